import numpy as np
import pytest

from lehr.core.reward import Valid
from lehr.core.trace import Segment, Trace
from lehr.pipeline.samples import Crediting, DomainScales, to_samples
from lehr.rollout.base import Group, Judged


def group(*rewards: float) -> Group:
    def member(number: int, reward: float) -> Judged:
        own = np.array([False, True, True])
        segment = Segment(
            tokens=np.array([1, 2, number], np.int32),
            own=own,
            logprobs=np.zeros(3, np.float32),
            raw_logprobs=np.zeros(3, np.float32),
            kept_mass=np.ones(3, np.float32),
            versions=np.where(own, 1, -1).astype(np.int64),
            turns=np.array([1], np.int32),
        )
        return Judged(Trace(f"t{number}", "task", "g", number, (segment,)), Valid(reward, passed=reward == 1.0))

    return Group("g", "d", "task", tuple(member(n, r) for n, r in enumerate(rewards)))


def advantages(weight: float, *rewards: float) -> dict[str, float]:
    samples = to_samples([group(*rewards)], DomainScales({}), Crediting("value", weight))
    return {s.trace_id: float(s.advantages[1]) for s in samples}


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_only_what_is_below_the_mean_is_weighted(weight: float):
    plain, weighted = advantages(1.0, 1, 0, 0, 0), advantages(weight, 1, 0, 0, 0)
    assert weighted["t0"] == plain["t0"] > 0
    for name in ("t1", "t2", "t3"):
        assert weighted[name] == pytest.approx(weight * plain[name]) and plain[name] < 0


def test_at_zero_the_worse_ones_are_left_out_and_the_better_ones_keep_their_advantage():
    assert advantages(0.0, 1, 0, 0, 0) == {"t0": advantages(1.0, 1, 0, 0, 0)["t0"]}
    assert advantages(0.0, 0.5, 0.5, 0.5) == advantages(1.0, 0.5, 0.5, 0.5), "no variance: all stay, at zero"
