from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lehr.core.batch import Batch, Manifest, Sample
from lehr.core.episode import Evidence
from lehr.core.errors import Failure
from lehr.core.reward import Invalid, Reward, Valid
from lehr.core.task import Message, Resources, Task
from lehr.core.trace import Segment, Span, Trace, Usage, Version
from lehr.wire.codec import CodecError, decode, encode


@dataclass(frozen=True, slots=True)
class Judgement:
    trace: Trace
    reward: Reward
    others: tuple[Reward, ...] = ()
    by_name: Mapping[str, Reward] = field(default_factory=dict)
    maybe: Reward | None = None


def a_trace() -> Trace:
    n = 5
    segment = Segment(
        tokens=np.arange(n, dtype=np.int32),
        own=np.array([False, False, True, True, False]),
        logprobs=np.linspace(-3, 0, n, dtype=np.float32),
        raw_logprobs=np.zeros(n, np.float32),
        kept_mass=np.ones(n, np.float32),
        versions=np.full(n, Version(3, 7).packed, np.int64),
        turns=np.array([2], np.int32),
    )
    spans = (Span("generate", 0.0, 1.5, 0, "engine"),)
    return Trace("t", "d@1/train/3", "g", 0, (segment, segment), "stop", spans, Usage(4, 2, 1), Failure("x"))


def assert_same_trace(a: Trace, b: Trace) -> None:
    assert (a.id, a.stop, a.spans, a.usage, a.failure) == (b.id, b.stop, b.spans, b.usage, b.failure)
    for mine, theirs in zip(a.segments, b.segments, strict=True):
        for name in ("tokens", "own", "logprobs", "raw_logprobs", "kept_mass", "versions", "turns"):
            left, right = getattr(mine, name), getattr(theirs, name)
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)
        assert mine.sampling == theirs.sampling


def test_core_types_come_back_equal() -> None:
    assert_same_trace(decode(encode(a_trace()), Trace), a_trace())
    manifest = Manifest(Version(2, 9), "/x", "ab", 3)
    assert decode(encode(manifest), Manifest) == manifest
    assert isinstance(decode(encode(manifest), Manifest).version, Version)
    evidence = Evidence("t", "answer", {"a.txt": b"\0\xff"}, 2, Failure("sandbox", "died"))
    assert decode(encode(evidence), Evidence) == evidence
    task = Task(
        id="d@1/train/0",
        domain="d",
        messages=(Message(role="user", content="hi"),),
        resources=Resources.model_validate({"cpu": 2, "mem": "1Gi"}),
    )
    assert decode(encode(task), Task) == task


def test_a_batch_comes_back_with_its_arrays() -> None:
    arrays = (np.arange(3, dtype=np.int32), np.ones(3, bool), np.zeros(3, np.float32), np.ones(3, np.float32))
    batch = decode(encode(Batch(4, "policy_gradient", (Sample(*arrays, prefix="p"),))), Batch)
    assert batch.step == 4
    assert batch.samples[0].prefix == "p"
    np.testing.assert_array_equal(batch.samples[0].tokens, arrays[0])
    assert batch.samples[0].own.dtype == np.bool_


def test_a_choice_of_dataclasses_comes_back_as_the_one_that_was_sent() -> None:
    valid = Valid(0.5, {"tests": 0.5}, (0.1, 0.4), True)
    invalid = Invalid("sandbox", "died")
    sent = Judgement(a_trace(), valid, (invalid, valid), {"a": invalid}, None)
    got = decode(encode(sent), Judgement)
    assert (got.reward, got.others, got.by_name, got.maybe) == (valid, (invalid, valid), {"a": invalid}, None)
    assert_same_trace(got.trace, sent.trace)
    assert decode(encode(invalid), Reward) == invalid
    with pytest.raises(CodecError):
        decode(encode({"value": 1.0, "surprise": 2}), Reward)
    with pytest.raises(CodecError):
        decode(encode({"reason": "no such reason", "detail": ""}), Reward)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3), (2, 0, 4)])
@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "uint8", "float16", "float32", "float64", ">i4"])
def test_any_array_of_numbers_travels_untyped(shape: tuple[int, ...], dtype: str) -> None:
    array = np.asarray(np.random.default_rng(0).random(shape) * 100).astype(dtype)
    got = decode(encode({"x": [array]}))["x"][0]
    assert got.shape == shape
    assert got.dtype == np.dtype(dtype).newbyteorder("<")
    np.testing.assert_array_equal(got, array)
    assert not got.flags.writeable
    assert got.flags.aligned


def test_a_strided_view_travels_by_content() -> None:
    array = np.arange(24).reshape(4, 6)[::2, ::-3]
    np.testing.assert_array_equal(decode(encode(array)), array)


def test_numpy_scalars_become_numbers() -> None:
    assert decode(encode({"loss": np.float32(0.5), "n": np.int64(3)}), dict[str, float]) == {
        "loss": 0.5,
        "n": 3,
    }


def test_an_array_of_another_dtype_is_refused() -> None:
    with pytest.raises(CodecError, match=r"float32.*got int64"):
        decode(encode(np.arange(3)), NDArray[np.float32])
    with pytest.raises(CodecError, match="expected an array"):
        decode(encode([1, 2]), NDArray[np.float32])


@pytest.mark.parametrize("value", [Path("/x"), object(), np.array(["a"]), np.array([object()]), {1: {2: len}}])
def test_what_is_not_data_is_refused(value: object) -> None:
    with pytest.raises(CodecError):
        encode(value)


def test_bytes_that_are_not_the_type_are_refused_with_the_field() -> None:
    with pytest.raises(CodecError, match=r"nbytes"):
        decode(encode({"version": [1, 2], "path": "x", "digest": "", "nbytes": "many"}), Manifest)
    with pytest.raises(CodecError):
        decode(b"\xc1garbage")
    with pytest.raises(CodecError):
        decode(encode(a_trace())[:-3], Trace)


def test_a_forged_array_header_is_refused() -> None:
    import msgspec

    def forged(data: bytes) -> bytes:
        return msgspec.msgpack.encode(msgspec.msgpack.Ext(1, data))

    for data in (b"", b"<f4\0\x01", b"|O\0\0\x01" + (1).to_bytes(8, "little") + b"12345678",
                 b"<f4\0\x01" + (2**63).to_bytes(8, "little"), b"zzzz\x00"):  # fmt: skip
        with pytest.raises(CodecError):
            decode(forged(data))
    with pytest.raises(CodecError):
        decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(9, b"")))
