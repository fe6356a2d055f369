from __future__ import annotations

import json
from pathlib import Path

import pytest

from lehr.core.errors import ConfigError, LehrError
from lehr.model.checkpoint import load_decoder, save_model
from lehr.model.config import load_config
from lehr.model.tiny import tiny_decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk."""
    path = tmp_path_factory.mktemp("models") / "m"
    save_model(tiny_decoder(seed=0), path)
    return path


@pytest.fixture
def change(folder: Path):
    """Return a function that changes keys of the model's configuration until the test ends."""
    file = folder / "config.json"
    kept = file.read_text()
    yield lambda **keys: file.write_text(json.dumps(json.loads(kept) | keys))
    file.write_text(kept)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 10**6),
        ("vocab_size", 10**12),
        ("vocab_size", "many"),
        ("hidden_size", None),
        ("hidden_size", True),
        ("hidden_size", 64.5),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("head_dim", [8]),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("inf")),
        ("max_position_embeddings", "long"),
        ("eos_token_id", ["x"]),
        ("rope_parameters", 3),
        ("model_type", "llamma"),
    ],
)
def test_a_wrong_value_is_named_with_its_file_and_key(folder: Path, change, key: str, value: object) -> None:
    change(**{key: value})
    with pytest.raises(LehrError) as caught:
        load_config(folder)
    text = str(caught.value)
    assert str(folder / "config.json") in text and "pydantic" not in text
    assert (key in text or key == "model_type") and str(value) in text


def test_a_missing_key_and_a_missing_file_are_told_apart(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json in"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json lacks the key 'model_type'"):
        load_config(tmp_path)


def test_a_size_that_the_weights_do_not_have_takes_no_memory(folder: Path, change) -> None:
    change(vocab_size=1 << 24, hidden_size=1 << 24)
    with pytest.raises(ConfigError, match=r"embed_tokens.* has shape"):
        load_decoder(folder)


def test_no_pad_token_may_be_written_as_minus_one(folder: Path, change) -> None:
    change(pad_token_id=-1)
    assert load_config(folder).pad_id is None
