"""The settings of the embedded engine as flags of a command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lehr.core.task import parse_size

if TYPE_CHECKING:
    from lehr.engine.native.settings import NativeConfig

F = TypeVar("F", bound=Callable[..., Any])

_SPARSE = ("sinks", "window", "top_blocks", "block")


class _Size(click.ParamType[int]):
    """Bytes, written like ``512M`` or ``8Gi``."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            found = parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if found >= 1 << 62:
            self.fail(f"{value} is too large; expected less than {1 << 62} bytes", param, ctx)
        return found


_FLAGS = (
    click.option(
        "--cache-tokens", default=32768, show_default=True, type=click.IntRange(16, (1 << 31) - 1),
        help="Tokens that the cache of keys and values holds; no request is longer.",
    ),
    click.option(
        "--tier-memory", "tier_memory_bytes", default=0, type=_Size(),
        help="Memory, such as 2Gi, for keys and values that the cache has no room for, compressed without loss."
        " 0, the default, keeps none.",
    ),
    click.option(
        "--tier-disk", "tier_disk_bytes", default=0, type=_Size(),
        help="Space on disk, such as 20Gi, for what --tier-memory has no room for; needs --tier-folder.",
    ),
    click.option(
        "--tier-folder", default="", metavar="FOLDER",
        help="Where those files go, readable by this user only and removed at the end.",
    ),
    click.option(
        "--rope-scaling", type=click.Choice(["linear", "dynamic", "llama3", "yarn"]),
        help="How positions beyond the trained length are read, in place of what the model says; needs"
        " --rope-factor.",
    ),
    click.option(
        "--rope-factor", type=click.FloatRange(1, min_open=True),
        help="How many times the trained length a context may be; also needs --cache-tokens for as much.",
    ),
    click.option(
        "--sparse", "is_sparse", is_flag=True,
        help="Attend to the first tokens, the last ones and the blocks between that may matter most: for"
        " contexts of tens of thousands of tokens. Changes what is sampled.",
    ),
    click.option(
        "--sparse-sinks", "sinks", type=click.IntRange(0, (1 << 20) - 1),
        help="First tokens that are always seen (64). This and the next three turn --sparse on.",
    ),
    click.option(
        "--sparse-window", "window", type=click.IntRange(32, (1 << 24) - 1),
        help="Tokens before each position that are always seen (1024).",
    ),
    click.option(
        "--sparse-top-blocks", "top_blocks", type=click.IntRange(1, (1 << 16) - 1),
        help="Blocks between the two that are seen (32).",
    ),
    click.option(
        "--sparse-block", "block", type=click.Choice(["8", "16", "32", "64", "128"]),
        help="Tokens in a block (64).",
    ),
    click.option(
        "--batch-invariant", is_flag=True,
        help="Give a request the same bits whatever else runs, however its prompt is cut and whatever was"
        " cached; slower. Not with --sparse.",
    ),
)  # fmt: skip


def engine_flags(command: F) -> F:
    """Give ``command`` the flags; it gets them as keywords, for :func:`engine_settings`."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


def engine_settings(given: Mapping[str, Any], *, is_fast: bool = False, **others: Any) -> NativeConfig:
    """Return the settings that the flags say, and ``others`` of ``NativeConfig``.

    Raises :class:`ConfigError` that names flags which do not go together.
    """
    from lehr.core.config import resolve
    from lehr.core.errors import ConfigError
    from lehr.engine.native.settings import FAST, NativeConfig

    raw: dict[str, Any] = dict(given) | others
    kind, factor = raw.pop("rope_scaling"), raw.pop("rope_factor")
    if (kind is None) != (factor is None):
        both = ("--rope-factor", "--rope-scaling")
        alone, missing = both if kind is None else both[::-1]
        raise ConfigError(
            f"{alone} without {missing}", expected="both, such as --rope-scaling yarn --rope-factor 4"
        )
    raw["rope_scaling"] = {"type": kind, "factor": factor} if kind else None
    sparse = {name: value for name in _SPARSE if (value := raw.pop(name)) is not None}
    if "block" in sparse:
        sparse["block"] = int(sparse["block"])
    raw["sparse"] = sparse if raw.pop("is_sparse") or sparse else None
    if raw["tier_disk_bytes"] and not raw["tier_folder"]:
        raise ConfigError("--tier-disk without --tier-folder", expected="a folder on a fast local disk")
    if raw["tier_folder"] and not raw["tier_disk_bytes"]:
        raise ConfigError(
            "--tier-folder without --tier-disk", expected="the space that files may take, such as 20Gi"
        )
    return resolve(NativeConfig, raw | dict(FAST if is_fast else {}), where="the engine's settings")
