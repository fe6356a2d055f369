import pytest

from lehr.core.errors import ConfigError
from lehr.rollout.dispatcher import Admit
from lehr.schedule.admission import Admission


def test_it_is_what_the_dispatcher_asks_for() -> None:
    admit: Admit = Admission(1, 8)
    assert admit.capacity(0, 0) == 16


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("version_n", [0, 1, 7, 1000])
def test_r5_after_a_resume_the_capacity_is_bound_plus_one_batches(bound: int, version_n: int) -> None:
    trained = version_n * 8
    assert Admission(bound, 8).capacity(version_n, trained) == (bound + 1) * 8


def test_r3_bound_zero_never_starts_a_group_ahead_of_its_version() -> None:
    admission = Admission(0, 4)
    started = 0
    for version_n in range(6):
        assert admission.capacity(version_n, started) == 4
        started += 4
        assert admission.capacity(version_n, started) == 0


def test_capacity_is_never_negative() -> None:
    assert Admission(1, 4).capacity(0, 100) == 0


@pytest.mark.parametrize(("bound", "batch"), [(-1, 4), (0, 0)])
def test_impossible_bounds_are_refused(bound: int, batch: int) -> None:
    with pytest.raises(ConfigError):
        Admission(bound, batch)
