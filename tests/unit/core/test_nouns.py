"""Rewards, versions, errors, clocks, the registry, the recorder."""

import math
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from lehr.core import errors, registry
from lehr.core.clock import Deadline, SystemClock, VirtualClock
from lehr.core.errors import ConfigError, DeadlineExceeded, Failure, LehrError, OutOfSpace, UnknownName
from lehr.core.protocols import ListRecorder, NullRecorder, Recorder
from lehr.core.registry import Registry
from lehr.core.reward import Invalid, Valid, checked
from lehr.core.trace import Segment, Trace, Version


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_invalid(value: float) -> None:
    reward = checked(value, 0.0, 1.0, parts={}, passed=True)
    assert isinstance(reward, Invalid)
    assert reward.reason == "not_finite"


@pytest.mark.parametrize("value", [-0.001, 1.001])
def test_a_reward_outside_its_range_is_invalid(value: float) -> None:
    reward = checked(value, 0.0, 1.0, parts={}, passed=True)
    assert isinstance(reward, Invalid)
    assert reward.reason == "out_of_range"
    assert "[0.0, 1.0]" in reward.detail


def test_a_reward_on_the_edge_is_valid_and_owns_its_parts() -> None:
    parts = {"tests": 1.0}
    reward = checked(1.0, 0.0, 1.0, parts=parts, passed=True)
    parts["tests"] = 0.0
    assert reward == Valid(1.0, {"tests": 1.0}, None, True)


def test_versions_order_by_incarnation_and_pack_alike() -> None:
    versions = [Version(1, 0), Version(1, 5), Version(1, 2**32 - 1), Version(2, 0), Version(2**31 - 1, 1)]
    assert sorted(versions) == versions
    assert sorted(v.packed for v in versions) == [v.packed for v in versions]
    assert [Version.unpack(v.packed) for v in versions] == versions
    assert all(v.packed < 2**63 for v in versions)
    assert str(Version(3, 7)) == "3.7"


def segment(versions: list[int], own: list[bool]) -> Segment:
    n = len(own)
    floats = np.zeros(n, np.float32)
    return Segment(
        tokens=np.zeros(n, np.int32),
        own=np.array(own),
        logprobs=floats,
        raw_logprobs=floats,
        kept_mass=floats,
        versions=np.array(versions, np.int64),
        turns=np.zeros(1, np.int32),
    )


def test_the_oldest_version_of_a_trace_is_that_of_its_own_tokens() -> None:
    old, new = Version(1, 3), Version(1, 4)
    segments = (
        segment([-1, new.packed], [False, True]),
        segment([-1, old.packed, new.packed], [False, True, True]),
    )
    assert Trace("t", "x", "g", 0, segments).oldest_version == old
    assert Trace("t", "x", "g", 0, (segment([-1], [False]),)).oldest_version is None
    assert Trace("t", "x", "g", 0, ()).oldest_version is None


def test_a_message_has_three_parts() -> None:
    error = ConfigError("no folder /x", expected="a model folder", hint="Type `lehr models fetch`")
    assert str(error) == "no folder /x. Expected a model folder. Type `lehr models fetch`"
    assert str(LehrError("done!")) == "done!"


def test_every_error_has_a_code_of_its_own_and_stands_in_the_drawn_tree() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, LehrError)]
    codes = [k.__dict__["code"] for k in kinds]
    assert len(set(codes)) == len(codes)
    assert all(kind.__name__ in (errors.__doc__ or "") for kind in kinds)
    for kind in kinds:
        assert Failure.of(kind("what")) == Failure(kind.code, "what.")


def test_an_error_is_also_the_stdlib_error_it_resembles() -> None:
    assert isinstance(ConfigError("x"), ValueError)
    assert isinstance(UnknownName("x"), LookupError)
    assert isinstance(DeadlineExceeded("x"), TimeoutError)
    assert isinstance(OutOfSpace("x"), OSError)


def test_failures_of_foreign_errors_are_named_by_class() -> None:
    assert Failure.of(KeyError("a")) == Failure("KeyError", "'a'")
    assert Failure.of(ZeroDivisionError()) == Failure("ZeroDivisionError", "ZeroDivisionError")


def test_an_unknown_name_lists_near_ones_or_all() -> None:
    near = UnknownName.among("domain", "code/function", ["documents/invoices", "code/functions"])
    assert str(near) == "unknown domain 'code/function'. Expected 'code/functions'."
    far = UnknownName.among("domain", "zzz", ["b", "a"], hint="See `lehr domains list`")
    assert str(far) == "unknown domain 'zzz'. Expected one of a, b. See `lehr domains list`"


def test_a_deadline_runs_on_its_clock() -> None:
    clock = VirtualClock()
    deadline = Deadline.after(10, clock)
    clock.advance(9.5)
    assert deadline.remaining_s == 0.5
    deadline.check("a wait")
    clock.advance(1)
    assert deadline.remaining_s == 0.0
    with pytest.raises(DeadlineExceeded, match="a wait ran past its deadline"):
        deadline.check("a wait")
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)


def test_the_system_clock_never_goes_back() -> None:
    clock = SystemClock()
    readings = [clock.now() for _ in range(100)]
    assert readings == sorted(readings)
    assert 0 < Deadline.after(5).remaining_s <= 5


def test_a_registry_finds_what_was_registered() -> None:
    things: Registry[int] = Registry("thing")
    assert things.register("one", 1) == 1
    assert things.register("one", 1) == 1
    assert things.get("one") == 1
    with pytest.raises(ConfigError, match="registered twice"):
        things.register("one", 2)
    with pytest.raises(UnknownName, match=r"unknown thing 'oen'\. Expected 'one'"):
        things.get("oen")


def test_a_registry_finds_a_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def points(*, group: str) -> list[EntryPoint]:
        asked.append(group)
        return [EntryPoint("square_root", "math:sqrt", group)]

    monkeypatch.setattr(registry, "entry_points", points)
    things: Registry[object] = Registry("thing")
    things.register("own", 1)
    assert things.get("own") == 1
    assert asked == [], "plug-ins are looked up only when a name is not found"
    assert things.get("square_root") is math.sqrt
    assert list(things) == ["own", "square_root"]
    assert set(asked) == {"lehr.thing"}


def test_recorders_record() -> None:
    recorder = ListRecorder()
    recorder.record("exec", kind_of="x", seconds=1.0)
    assert recorder.events == [("exec", {"kind_of": "x", "seconds": 1.0})]
    assert isinstance(recorder, Recorder)
    assert isinstance(NullRecorder(), Recorder)
    NullRecorder().record("exec", a=1)
