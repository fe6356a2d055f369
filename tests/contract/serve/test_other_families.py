"""A model that the native engine does not know, served all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lehr.model.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models") / "gemma"
    settings = transformers.Gemma2Config(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, eos_token_id=258, bos_token_id=256,
        pad_token_id=256,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    ByteTokenizer().save(folder)
    return folder


def test_it_is_served(start: Any, gemma: Path) -> None:
    with start(gemma, "--json").client() as client:
        asked = [{"role": "user", "content": "Hi"}]
        said = [
            client.chat.completions.create(model="gemma", messages=asked, max_tokens=8, seed=3)
            for _ in range(2)
        ]
        assert said[0].choices[0].message.content == said[1].choices[0].message.content
        assert said[0].usage.completion_tokens <= 8 and said[0].usage.prompt_tokens > 8
        stream = client.chat.completions.create(
            model="gemma", messages=asked, max_tokens=8, seed=3, stream=True
        )
        text = "".join(part.choices[0].delta.content or "" for part in stream if part.choices)
        assert text == said[0].choices[0].message.content


def test_the_fast_variant_is_refused_and_the_slow_one_announced(gemma: Path) -> None:
    command = [sys.executable, "-m", "lehr", "serve", str(gemma), "--port", "0", "--fast"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert "the native engine does not know the family 'gemma2'. Sampling with transformers" in ended.stderr
    assert "error: draft_tokens is 8, which the native engine alone has" in ended.stderr
