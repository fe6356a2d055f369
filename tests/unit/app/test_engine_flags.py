"""The engine's settings as flags: what they say, and what they refuse by name."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from lehr.app.commands.engine_flags import engine_flags, engine_settings
from lehr.core.errors import ConfigError
from lehr.engine.native.settings import NativeConfig, SparseConfig, fast
from lehr.model.scaling import RopeScaling


def settings(*flags: str, **others: Any) -> NativeConfig:
    found: list[NativeConfig] = []

    @click.command()
    @engine_flags
    def command(**given: Any) -> None:
        found.append(engine_settings(given, **others))

    done = CliRunner().invoke(command, flags)
    if done.exception is not None:
        raise ValueError(done.output) if isinstance(done.exception, SystemExit) else done.exception
    return found[0]


def test_without_flags_the_settings_are_the_usual_ones() -> None:
    assert settings() == NativeConfig()
    assert settings(is_fast=True, max_running=3) == fast(NativeConfig(max_running=3))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--batch-invariant --cache-tokens 512", NativeConfig(batch_invariant=True, cache_tokens=512)),
        (
            "--rope-scaling yarn --rope-factor 2.5",
            NativeConfig(rope_scaling=RopeScaling(type="yarn", factor=2.5)),
        ),
        ("--sparse", NativeConfig(sparse=SparseConfig())),
        (
            "--sparse-sinks 0 --sparse-window 32 --sparse-top-blocks 2 --sparse-block 8",
            NativeConfig(sparse=SparseConfig(sinks=0, window=32, top_blocks=2, block=8)),
        ),
        ("--tier-memory 2Gi", NativeConfig(tier_memory_bytes=2 << 30)),
        (
            "--tier-memory 1M --tier-disk 20GiB --tier-folder /a",
            NativeConfig(tier_memory_bytes=1 << 20, tier_disk_bytes=20 << 30, tier_folder="/a"),
        ),
    ],
)
def test_a_flag_is_a_setting(flags: str, expected: NativeConfig) -> None:
    assert settings(*flags.split()) == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--cache-tokens 15", "16<=x<=2147483647"),
        ("--sparse-window 31", "32<=x<=16777215"),
        ("--sparse-block 7", "'8', '16', '32', '64', '128'"),
        ("--rope-factor 1 --rope-scaling yarn", "x>1"),
        ("--rope-scaling stretched --rope-factor 2", "'linear', 'dynamic', 'llama3', 'yarn'"),
        ("--tier-memory much", "cannot read the size 'much'; write it like 512M or 8Gi"),
        ("--tier-memory 9999999999T", "expected less than 4611686018427387904 bytes"),
    ],
)
def test_a_value_beyond_its_limits_is_told_them(flags: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        settings(*flags.split())
    assert words in " ".join(str(caught.value).split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rope-factor 4", "--rope-factor without --rope-scaling"),
        ("--rope-scaling yarn", "--rope-scaling without --rope-factor"),
        ("--tier-disk 1Gi", "--tier-disk without --tier-folder"),
        ("--tier-folder /a", "--tier-folder without --tier-disk"),
        ("--sparse --batch-invariant", "batch_invariant cannot go with sparse"),
    ],
)
def test_flags_that_do_not_go_together_are_named(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(*flags.split())
