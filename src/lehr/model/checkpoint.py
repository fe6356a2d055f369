"""Model folders in and out: Hugging Face safetensors to a :class:`Decoder` and back.

A saved folder opens with ``transformers.AutoModelForCausalLM``, one with a scalar head with
``AutoModelForSequenceClassification``. It appears under its name only when it is
complete. Any family of ``model.config.FAMILIES`` loads; another is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lehr.core.errors import ConfigError, OutOfSpace
from lehr.model.config import load_config
from lehr.model.decoder import Decoder
from lehr.model.dtype import dtype_name
from lehr.model.scaling import RopeScaling
from lehr.model.weights import WEIGHTS, require_whole, weight_files


class Savable(Protocol):
    """Something that writes its files into a model folder."""

    def save(self, folder: Path) -> None:
        """Write into ``folder``."""
        ...


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the weights in ``folder`` by name, from one file or from the shards that its index names."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        tensors.update(read_tensors(file))
    return tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one safetensors file. Raises :class:`ConfigError` if missing or damaged."""
    from safetensors.torch import load_file

    require_whole(path)
    return load_file(path)


def load_decoder(
    folder: Path, dtype: torch.dtype = torch.float32, scaling: RopeScaling | None = None
) -> Decoder:
    """Return the model in ``folder`` with weights of type ``dtype``. ``scaling`` replaces the position scaling
    of its configuration.
    """
    config, tensors = load_config(folder).scaled(scaling), load_tensors(folder)
    try:
        return Decoder.from_hf(config, tensors, dtype)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error.what}", expected=error.expected, hint=error.hint) from error


def load_scalar(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Return the model in ``folder`` with a scalar head: its own, or on a language model a new one of zeros,
    whose every score is 0 at first.
    """
    config = load_config(folder)
    if config.scalar:
        return load_decoder(folder, dtype)
    tensors = load_tensors(folder)
    tensors["score.weight"] = torch.zeros(1, config.hidden_size)
    return Decoder.from_hf(config.with_scalar_head(), tensors, dtype)


def file_digest(path: Path) -> str:
    """Return blake2b-128 of a file, as ``core.batch.Manifest`` names it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def write_model(decoder: Decoder, folder: Path, tokenizer: Savable | None = None) -> None:
    """Write the model, and the tokenizer's files, into ``folder``, which exists. Not atomic."""
    from safetensors.torch import save_file

    config = decoder.config
    save_file(decoder.to_hf(), str(folder / WEIGHTS), metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    raw = config.to_hf(dtype_name(decoder.embed.weight.dtype))
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    ids = {k: raw[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if raw[k] is not None}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save(folder)


def save_model(
    decoder: Decoder,
    folder: Path,
    tokenizer: Savable | None = None,
    extra: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write the model to ``folder`` atomically, replacing what was there. ``extra`` adds files of its own.

    Raises :class:`OutOfSpace` when the disk is full; what was there before is then intact.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"cannot write to {folder.parent}: {error.strerror}") from error
    try:
        write_model(decoder, work, tokenizer)
        extra(work)
        work.chmod(0o755)
        replace_folder(work, folder)
    except OSError as error:
        raise OutOfSpace(f"cannot save {folder}: {error}", hint="Free space and run again.") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def replace_folder(new: Path, folder: Path) -> None:
    """Put ``new`` in the place of ``folder``: at every moment the old or the new is there, whole, under
    ``folder`` or, for an instant, under a hidden name beside it.
    """
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        new.rename(folder)
