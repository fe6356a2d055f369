import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lehr.core.errors import ConfigError
from lehr.model.chat import ChatRenderer
from lehr.model.tokenizer import ByteTokenizer
from lehr.pipeline.conversations import as_line, held_apart, read_conversations, render
from lehr.pipeline.recipe import SftStage

TOKENIZER = ByteTokenizer()
RENDERER = ChatRenderer(TOKENIZER)
USER = {"role": "user", "content": "1+1?"}
SAID = {"role": "assistant", "content": "2"}


def write(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def trained(path: Path, **options: Any) -> list[str]:
    """What the model learns to say, per conversation, ends of turns as ``|``."""
    rendered = render(read_conversations(path, RENDERER), RENDERER, **{"max_tokens": 4096, **options})
    return ["".join(chr(t) if t < 256 else "|" for t in s.tokens[s.own]) for s in rendered.samples]


def test_only_the_assistants_tokens_carry_loss_over_several_turns(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    path = write(
        tmp_path,
        {"messages": [USER, SAID, USER, {"role": "assistant", "content": "two"}, USER], "id": 7},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "x"},
                SAID,
            ],
            "tools": tools,
        },
        {"prompt": "1+1?", "completion": "2"},
        {"messages": [USER, {**SAID, "weight": 0}, USER, {"role": "assistant", "content": "II"}]},
    )
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert trained(path) == ["2|two|", f"{called}|2|", "2|", "II|"]
    (first, second, *_) = render(read_conversations(path), RENDERER, max_tokens=4096).samples
    prompt = [m for m in read_conversations(path)[0].messages[:1]]
    assert list(first.tokens[: int(np.argmax(first.own))]) == RENDERER.start(tuple(prompt))
    assert b"add" in bytes(int(t) for t in second.tokens[: int(np.argmax(second.own))] if t < 256)


def test_the_tokens_are_those_that_a_rollout_of_the_conversation_would_have(tmp_path: Path) -> None:
    (read,) = read_conversations(write(tmp_path, {"messages": [USER, SAID, USER, SAID]}))
    (sample,) = render([read], RENDERER, max_tokens=4096).samples
    start = RENDERER.start(read.messages[:1])
    turn = RENDERER.extend([*start, *RENDERER.complete("2")], read.messages[2:3])
    assert list(sample.tokens) == [*turn, *RENDERER.complete("2")]


def test_every_bad_line_is_named_with_what_was_expected(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"messages": [USER, SAID]},
        "{not json",
        [1],
        {"mesages": []},
        "",
        {"messages": [SAID]},
        {"messages": [USER]},
        {"messages": [{"role": "robot", "content": "x"}, SAID]},
        {"messages": [{"role": "user", "content": 7}, SAID]},
        {"messages": [{"role": "user", "content": "a \ud83d b"}, SAID]},
        {"messages": [{"role": "user", "content": "a \U0001f600 b"}, SAID]},
    )
    with pytest.raises(ConfigError) as caught:
        read_conversations(path)
    text = str(caught.value)
    assert text.startswith("8 lines cannot be used")
    for place, told in [
        (2, "not JSON"),
        (3, "a list; expected an object"),
        (4, "did you mean 'messages'"),
        (6, "expected one of the system or the user before it"),
        (7, "no message of the assistant to learn from"),
        (8, r"messages.0.role: Input should be 'system'"),
        (9, "messages.0.content: Input should be a valid string (found '7')"),
        (10, r"'\ud83d' is half of a surrogate pair; expected whole characters"),
    ]:
        (line,) = [x for x in text.splitlines() if f":{place}: " in x]
        assert told in line
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl: No such file"):
        read_conversations(tmp_path / "none.jsonl")


def test_too_long_is_left_out_or_cut_and_counted(tmp_path: Path) -> None:
    long = {"role": "assistant", "content": "x" * 50}
    path = write(
        tmp_path, {"messages": [USER, SAID]}, {"messages": [USER, long]}, {"messages": [long | USER, long]}
    )
    read = read_conversations(path)
    limit = len(RENDERER.start(read[0].messages[:1])) + 10
    left_out = render(read, RENDERER, max_tokens=limit)
    assert (len(left_out.samples), left_out.refused, left_out.cut) == (1, 2, 0)
    cut = render(read, RENDERER, max_tokens=limit, too_long="cut")
    assert (len(cut.samples), cut.refused, cut.cut) == (3, 0, 2)
    assert max(len(s.tokens) for s in cut.samples) == limit
    assert trained(path, max_tokens=limit, too_long="cut")[1] == "x" * 10
    none = render(read, RENDERER, max_tokens=5, too_long="cut")
    assert (len(none.samples), none.refused) == (0, 3)


def test_equal_conversations_are_held_out_together_or_not_at_all(tmp_path: Path) -> None:
    lines = [{"messages": [{"role": "user", "content": f"q{i % 10}"}, SAID]} for i in range(40)]
    samples = render(read_conversations(write(tmp_path, *lines)), RENDERER, max_tokens=999).samples
    train, held = held_apart(samples, 0.2, seed=1)
    assert (len(train), len(held)) == (32, 8)
    assert not {s.tokens.tobytes() for s in train} & {s.tokens.tobytes() for s in held}
    places = [[s.trace_id for s in held_apart(samples, 0.2, seed=n)[1]] for n in (1, 1, 2)]
    assert places[0] == places[1] != places[2]
    assert len(held_apart(samples, 0.0, seed=1)[0]) == 40
    with pytest.raises(ConfigError, match="1 of them different, are too few"):
        held_apart(samples[:1], 0.2, seed=1)


def test_a_written_conversation_can_be_read_back(tmp_path: Path) -> None:
    (read,) = read_conversations(write(tmp_path, {"messages": [USER, SAID]}))
    path = tmp_path / "again.jsonl"
    path.write_text(as_line(read.messages, {"passed": True}))
    assert read_conversations(path)[0].messages == read.messages


def test_what_does_not_go_together_is_refused() -> None:
    assert SftStage().from_gold == 36 and SftStage(data="x").from_gold == 0
    assert SftStage(data="x").judged_by == "loss" and SftStage().judged_by == "rate"
    for wrong in [{"demonstrations": 0}, {"best_by": "loss"}, {"data": "x", "heldout_share": 0}]:
        with pytest.raises(ValueError):
            SftStage(**wrong)  # type: ignore[arg-type]
