"""A server whose engine has other settings than the usual ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lehr.model.config import load_config

from .conftest import Script, Start

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def test_a_server_with_longer_positions_slower_tiers_and_the_same_bits_for_all(
    start: Start, script: Script, tmp_path: Path
) -> None:
    trained = load_config(script.folder).max_positions
    flags = ["--rope-scaling", "linear", "--rope-factor", "2", "--cache-tokens", str(4 * trained)]
    flags += ["--tier-memory", "8M", "--tier-disk", "8M", "--tier-folder", str(tmp_path), "--batch-invariant"]
    running = start(script.folder, "--json", *flags)
    client = running.client()
    (model,) = client.models.list()
    assert model.model_extra is not None and model.model_extra["max_model_len"] == 2 * trained
    assert list(tmp_path.iterdir()), "a folder for the files of this engine"
    done = client.chat.completions.create(model=model.id, messages=HELLO, temperature=0, max_tokens=11)
    assert done.choices[0].message.content
    assert running.end() == 143
    assert not list(tmp_path.iterdir())
