"""``lehr serve --fast``: the same model, and how far it agrees is told at the start."""

from __future__ import annotations

import json

from .conftest import NAME, SAID, Running, Script, Start


def test_the_fast_variant_says_the_same_and_tells_how_far_it_agrees(start: Start, script: Script) -> None:
    running = start(script.folder, "--json", "--fast")
    agreement = json.loads(running.first_line)["agreement"]
    assert agreement["positions"] >= 6 and agreement["same"] == agreement["positions"], (
        "the model is sure of what it says: rounding changes nothing"
    )
    answer = running.client().chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "Hello"}], temperature=0
    )
    assert SAID in (answer.choices[0].message.content or "")


def test_the_standard_variant_is_not_compared_with_itself(server: Running) -> None:
    assert "agreement" not in json.loads(server.first_line)
