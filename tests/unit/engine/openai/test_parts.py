"""The pace, Retry-After, names and prices, on a clock that the test turns."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest

from lehr.core.clock import VirtualClock
from lehr.core.errors import ConfigError
from lehr.core.trace import Usage
from lehr.engine.openai.pace import BURST_S, Pace
from lehr.engine.openai.refusals import retry_after_s
from lehr.engine.openai.settings import Prices, parse_name
from lehr.engine.openai.spent import cost_of


def paced(requests: float = 0, tokens: float = 0) -> tuple[Pace, VirtualClock]:
    clock = VirtualClock()

    async def sleep(seconds: float) -> None:
        assert seconds > 0
        clock.advance(seconds)

    return Pace(requests, tokens, clock=clock, sleep=sleep), clock


def times(pace: Pace, clock: VirtualClock, amounts: list[float]) -> list[float]:
    async def go() -> list[float]:
        found = []
        for amount in amounts:
            await pace.admit(amount)
            found.append(clock.now())
        return found

    return asyncio.run(go())


def test_requests_per_minute_hold_in_every_minute() -> None:
    pace, clock = paced(requests=60)
    found = times(pace, clock, [1.0] * 200)
    for begin in found:
        assert sum(begin <= t < begin + 60 for t in found) <= 60 + BURST_S
    assert found[-1] == pytest.approx(200 - BURST_S, abs=1.5), "slower than what is allowed"


def test_tokens_per_minute_count_what_was_really_used() -> None:
    pace, clock = paced(tokens=6000)
    found = times(pace, clock, [500.0] * 5)
    assert found == pytest.approx([0, 4, 9, 14, 19])
    pace.correct(500, 100)
    assert times(pace, clock, [500.0])[0] - found[-1] == pytest.approx(1.0)
    pace.correct(500, 1500)
    late = times(pace, clock, [500.0])[0]
    assert late - found[-1] == pytest.approx(16.0), "what was used beyond the estimate is owed"


def test_a_request_larger_than_the_burst_passes_and_is_paid_for() -> None:
    pace, clock = paced(tokens=600)
    found = times(pace, clock, [1200.0, 60.0])
    assert found[0] == 0 and found[1] == pytest.approx(120.0)


def test_a_hold_is_for_all() -> None:
    pace, clock = paced()
    pace.hold(7)
    pace.hold(3)
    assert times(pace, clock, [1.0, 1.0]) == pytest.approx([7, 7])


def test_those_who_wait_go_in_order() -> None:
    async def go() -> None:
        pace = Pace(requests_per_minute=60 * 200)
        order: list[int] = []

        async def one(number: int) -> None:
            await pace.admit(1)
            order.append(number)

        gone = asyncio.create_task(one(-1))
        tasks = [asyncio.create_task(one(n)) for n in range(5)]
        pace.hold(0.05)
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3, 4]

    asyncio.run(asyncio.wait_for(go(), 10))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": format_datetime(datetime.fromtimestamp(1_000_090, UTC), usegmt=True)}, 90.0),
        ({"retry-after": format_datetime(datetime.fromtimestamp(999_000, UTC), usegmt=True)}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers, now=1_000_000) == seconds


def test_names() -> None:
    assert parse_name("openai:gpt-x") == {"model": "gpt-x"}
    assert parse_name("openai:org/m@v2@http://h:1/v1") == {"model": "org/m@v2", "base_url": "http://h:1/v1"}
    for wrong in ("openai:", "openai:@http://h/v1", "openai:m@host:8000"):
        with pytest.raises(ConfigError, match="openai:NAME@BASE_URL"):
            parse_name(wrong)


def test_prices() -> None:
    usage = Usage(prompt_tokens=1_000_000, cached_tokens=400_000, own_tokens=10_000)
    assert cost_of(usage, None) is None
    assert cost_of(usage, Prices(prompt=2, completion=10)) == pytest.approx(2.1)
    assert cost_of(usage, Prices(prompt=2, cached=0.5, completion=10)) == pytest.approx(1.2 + 0.2 + 0.1)
