import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lehr.core.errors import ConfigError, OutOfSpace, UnknownName
from lehr.model import checkpoint
from lehr.model.tiny import random_decoder, tiny_config
from lehr.model.tokenizer import ByteTokenizer, load_tokenizer


def test_transformers_opens_a_saved_folder_and_agrees(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    decoder = random_decoder(seed=3, std=0.1)
    checkpoint.save_model(decoder, tmp_path / "m", ByteTokenizer())
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = peer(ids).logits[0]
    again = checkpoint.load_decoder(tmp_path / "m")
    assert all(torch.equal(a, b) for a, b in zip(decoder.to_hf().values(), again.to_hf().values(), strict=True))

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    with torch.no_grad():
        ours = again.logits(again.hidden(ids[0], torch.arange(40), attend))
    assert (ours - theirs).abs().max() < 1e-4


def test_shards_are_put_together(tmp_path: Path) -> None:
    decoder = random_decoder(seed=1)
    checkpoint.save_model(decoder, tmp_path / "m")
    tensors = checkpoint.load_tensors(tmp_path / "m")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in part}, str(tmp_path / "m" / file))
    (tmp_path / "m" / "model.safetensors").unlink()
    index = {"weight_map": {n: file for file, part in halves.items() for n in part}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert sorted(checkpoint.load_tensors(tmp_path / "m")) == names


def test_saving_replaces_a_folder_whole(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    checkpoint.save_model(random_decoder(seed=1), folder, ByteTokenizer())
    (folder / "stale").write_text("x")
    checkpoint.save_model(random_decoder(seed=2), folder, extra=lambda f: (f / "more").write_text("y") and None)
    assert not (folder / "stale").exists() and (folder / "more").read_text() == "y"
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_full_disk_leaves_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    checkpoint.save_model(random_decoder(seed=1), folder, ByteTokenizer())
    before = checkpoint.file_digest(folder / "model.safetensors")

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OutOfSpace, match="No space left"):
        checkpoint.save_model(random_decoder(seed=2), folder, extra=full)
    assert checkpoint.file_digest(folder / "model.safetensors") == before
    assert load_tokenizer(folder).vocab_size == 259
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        checkpoint.load_decoder(tmp_path)
    raw = tiny_config().to_hf()
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "mamba"}))
    with pytest.raises(UnknownName, match="'mamba'"):
        checkpoint.load_decoder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing"):
        checkpoint.load_decoder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(ConfigError, match="cannot read"):
        checkpoint.load_decoder(tmp_path)
