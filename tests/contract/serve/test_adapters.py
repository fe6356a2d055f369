"""Adapters as models of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import save_file

from lehr.model.config import load_config

from .conftest import NAME, SAID, Script, Start

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def adapter(script: Script, folder: Path) -> Path:
    """Write an adapter under which the model says something else."""
    config = load_config(script.folder)
    source = torch.Generator().manual_seed(1)
    base = "base_model.model.model.layers.0.mlp.down_proj"
    folder.mkdir()
    tensors = {
        f"{base}.lora_A.weight": torch.randn(2, config.intermediate_size, generator=source),
        f"{base}.lora_B.weight": torch.randn(config.hidden_size, 2, generator=source),
    }
    gate = "base_model.model.model.layers.0.mlp.{}_proj"
    for name in ("gate", "up"):
        tensors[f"{gate.format(name)}.lora_A.weight"] = torch.randn(2, config.hidden_size, generator=source)
        tensors[f"{gate.format(name)}.lora_B.weight"] = torch.randn(
            config.intermediate_size, 2, generator=source
        )
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 16}))
    return folder


def test_an_adapter_is_a_model_of_its_own(start: Start, script: Script, tmp_path: Path) -> None:
    running = start(script.folder, "--json", "--adapter", f"other={adapter(script, tmp_path / 'a')}")
    assert json.loads(running.first_line)["adapters"] == ["other"]
    client = running.client()
    assert [m.id for m in client.models.list()] == [NAME, "other"]
    assert client.models.retrieve("other").id == "other"

    def said(model: str) -> str:
        done = client.chat.completions.create(model=model, messages=HELLO, temperature=0, max_tokens=11)
        assert done.model == model
        return done.choices[0].message.content or ""

    assert said(NAME) == SAID and said("other") != SAID
    assert said(NAME) == SAID and said("other") == said("other"), "whatever the cache holds of the other"
    with pytest.raises(openai.NotFoundError, match="'other'"):
        said("third")
    assert running.end() == 143


@pytest.mark.parametrize("given", [f"{NAME}=x", "a=/nowhere"])
def test_an_adapter_that_cannot_be_served_ends_the_command(script: Script, given: str) -> None:
    command = [sys.executable, "-m", "lehr", "serve", str(script.folder), "--port", "0", "--adapter", given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert any(word in done.stderr for word in ("two models", "no adapter in")), done.stderr
