from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lehr.app.serve.text import TextStream
from lehr.app.serve.tools import Call, ToolStream, parse
from lehr.engine.native.stops import cut, find_stop
from lehr.model.messages import written
from lehr.model.tokenizer import ByteTokenizer

TEXT = st.text("aébc€😀", max_size=24)


@given(TEXT, st.lists(st.text("aébc€😀", min_size=1, max_size=4), max_size=4), st.integers(1, 5))
def test_pieces_join_to_the_text_before_the_leftmost_stop(said: str, stops: list[str], step: int) -> None:
    stream = TextStream(ByteTokenizer(), stops, [ByteTokenizer.IM_END])
    ids = [*said.encode(), ByteTokenizer.IM_END]
    shown, tokens, sampled = "", [], b""
    for i in range(0, len(ids), step):
        piece = stream.add(ids[i : i + step], [-1.0] * len(ids[i : i + step]))
        shown += piece.text
        tokens += piece.tokens
        sampled += bytes(t for t in ids[i : i + step] if t < 256)
        assert cut(sampled.decode(errors="ignore"), stops).startswith(shown), "nothing is taken back"
        if find_stop(sampled, [s.encode() for s in stops]):
            break
    last = stream.end()
    seen = sampled.decode(errors="ignore")
    assert shown + last.text == cut(seen, stops)
    scored = [*tokens, *last.tokens]
    assert b"".join(t.data for t in scored).decode() == cut(seen, stops)
    assert all(seen.encode()[:i].decode(errors="ignore") == seen[: t.offset] for i, t in enumerate(scored))


def test_what_is_left_of_a_character_is_replaced() -> None:
    stream = TextStream(ByteTokenizer(), (), ())
    assert stream.add([0xE2, 0x82], [0, 0]).text == "" and stream.end().text == "\ufffd"
    assert stream.end().text == "" == stream.add([65], [0]).text


def test_an_infinite_logprob_becomes_a_number_that_json_has() -> None:
    assert TextStream(ByteTokenizer(), (), ()).add([65], [float("-inf")]).tokens[0].logprob == -9999.0


ADD, SUB = Call("add", '{"a": 1}'), Call("sub", "{}")


@pytest.mark.parametrize(
    ("said", "text", "calls"),
    [
        ("plain text", "plain text", []),
        ("a < b", "a < b", []),
        ("<tool_cal", "<tool_cal", []),
        (written("add", '{"a": 1}'), "", [ADD]),
        ("See.\n" + written("add", '{"a": 1}') + "\n" + written("sub", "{}") + "\n", "See.", [ADD, SUB]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "", [ADD]),
        ("<tool_call>no json</tool_call> x", "<tool_call>no json</tool_call> x", []),
        ('<tool_call>{"name": "add", "argum', '<tool_call>{"name": "add", "argum', []),
        ('{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
        ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        ('{"name": "add", "parameters": 1}', '{"name": "add", "parameters": 1}', []),
        (' {"x": 1}', ' {"x": 1}', []),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_calls_are_told_from_text(said: str, text: str, calls: list[Call], step: int) -> None:
    stream = ToolStream({"add", "sub"})
    found = [item for i in range(0, len(said), step) for item in stream.add(said[i : i + step])]
    found += stream.end()
    assert "".join(item for item in found if isinstance(item, str)) == text
    assert [item for item in found if isinstance(item, Call)] == calls
    assert stream.called == bool(calls)


def test_text_is_not_held_back_without_need() -> None:
    stream = ToolStream({"add"})
    assert stream.add("a") == ["a"] and stream.add(" <to") == [] and stream.add("ad>") == [" <toad>"]


def test_deep_json_is_no_call() -> None:
    assert parse("[" * 100_000) is None


@pytest.mark.parametrize("arguments", ["[" * 100_000, "[" * 3000 + "]" * 3000, "9" * 5000, "{", "NaN"])
def test_arguments_of_earlier_calls_are_shown_whatever_they_are(arguments: str) -> None:
    assert written("f", arguments).startswith("<tool_call>")


@pytest.mark.parametrize(
    "text",
    [
        r'{"name": "f", "arguments": {"a": "\ud800"}}',
        r'{"name": "\udfff", "arguments": {}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": -1e999}}',
    ],
)
def test_a_call_that_no_answer_could_carry_stays_text(text: str) -> None:
    assert parse(text) is None
    stream = ToolStream({"f"})
    assert [*stream.add(text), *stream.end()] == [text] and not stream.called
