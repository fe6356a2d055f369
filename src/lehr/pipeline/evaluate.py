"""Measures any model on domains, outside a run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lehr.core.errors import ConfigError
from lehr.core.reward import Invalid, Reward
from lehr.core.task import Split
from lehr.domains.catalogue import match_domains, open_domain
from lehr.engine.native.settings import NativeConfig
from lehr.engine.openai.settings import OpenAIConfig
from lehr.evals.stats import wilson
from lehr.evals.suite import Result, Suite, run_suite
from lehr.pipeline.asked import api_settings, open_asked
from lehr.pipeline.models import context_tokens, load_renderer, locate_model, locate_reward_model, require_model
from lehr.pipeline.observer import Observer, Silent
from lehr.pipeline.pairs import agreement, read_pairs, reward_samples, score_gaps
from lehr.pipeline.sampler import open_sampler
from lehr.rollout.group import GroupRunner


@dataclass(frozen=True, slots=True)
class Row:
    """One domain's result: a pass rate with its 95 % Wilson interval, and how many could not be judged.

    causes: why they could not, with counts, the commonest first.
    """

    domain: str
    n: int
    passed: int
    low: float
    high: float
    invalid: int
    causes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PairsRow:
    """A reward model on pairs: how many got the preferred answer first (a tie is half of one), with the 95 %
    Wilson interval of that share, and by how much it is ahead on the mean.
    """

    n: int
    right: float
    low: float
    high: float
    margin: float


def evaluate_pairs(model: Path, file: Path) -> PairsRow:
    """Measure the reward model ``model``, a folder or a run, on the pairs in ``file``; raises ``ConfigError``
    naming what cannot be used of either.
    """
    from lehr.train.scorer import FrozenModel

    folder = locate_reward_model(model)
    pairs = read_pairs(file, load_renderer(folder), max_tokens=context_tokens(folder))
    samples = [sample for pair in pairs for sample in reward_samples(pair)]
    gaps = score_gaps(asyncio.run(FrozenModel.open(folder).score(samples)))
    right = agreement(gaps)
    low, high = wilson(round(right), len(gaps))
    return PairsRow(len(gaps), right, low, high, sum(gaps) / len(gaps))


def evaluate_model(
    model: str,
    domains: Sequence[str],
    *,
    split: Split = "heldout",
    count: int = 100,
    seed: int = 0,
    concurrency: int = 80,
    api: Sequence[str] = (),
    domain_paths: Sequence[Path | str] = (),
    engine: NativeConfig | None = None,
    observer: Observer | None = None,
) -> list[Row]:
    """Return a row per domain for one greedy attempt at each of its first ``count`` tasks.

    ``model`` is a name, a Hugging Face folder, a run folder (its last stage), or a model behind an
    OpenAI-compatible API, as ``openai:NAME@BASE_URL`` with ``api`` for its settings (``KEY=VALUE``, of
    :class:`~lehr.engine.openai.settings.OpenAIConfig`); ``domains`` are names or patterns such as
    ``reasoning/*``. Where a domain has fewer tasks than ``count``, the observer is told.
    """
    observer = observer or Silent()
    opened = {name: open_domain(name, domain_paths) for name in match_domains(domains, domain_paths)}
    asked = api_settings(model, api)
    if asked is not None and engine is not None:
        raise ConfigError(
            f"{model} is computed by its server, and no engine of ours can be chosen for it",
            expected="a model of one's own for --fast",
        )
    if asked is None:
        require_model(model, only_sampled=True)
    for name, domain in opened.items():
        size = domain.card.splits.get(split, 0)
        if not size:
            raise ConfigError(
                f"{name} has no {split} tasks",
                expected=f"one of the splits {', '.join(s for s, n in domain.card.splits.items() if n)}",
            )
        if size < count:
            observer.note(f"{name} has {size} {split} tasks; all of them are measured, not {count}")
    for domain in opened.values():
        domain.make_ready(observer.note)
    suite = Suite(opened, split, count, seed)
    if asked is not None:
        results = asyncio.run(_ask(asked, suite, observer))
    else:
        folder = locate_model(model, observer, only_sampled=True)
        if engine is not None:
            from lehr.engine.opening import require_engine

            require_engine(folder, engine)
        results = asyncio.run(_measure(folder, suite, concurrency, engine, observer))
    return [_row(name, [r for r in results if r.domain == name]) for name in opened]


def _row(domain: str, results: Sequence[Result]) -> Row:
    valid = [r for r in results if r.valid]
    passed = sum(r.passed for r in valid)
    low, high = wilson(passed, len(valid))
    causes = Counter(_cause(r.judged.reward) for r in results if not r.valid)
    return Row(domain, len(valid), passed, low, high, len(results) - len(valid), dict(causes.most_common()))


def _cause(reward: Reward) -> str:
    return f"{reward.reason}: {reward.detail}" if isinstance(reward, Invalid) else "not judged"


async def _measure(
    model: Path, suite: Suite, concurrency: int, engine: NativeConfig | None, observer: Observer
) -> list[Result]:
    observer.stage("start", None, "engine")
    async with open_sampler(model, engine=engine) as sampler:
        return await _run(sampler.runner, suite, concurrency, observer)


async def _ask(config: OpenAIConfig, suite: Suite, observer: Observer) -> list[Result]:
    async with open_asked(config) as asked:
        results = await _run(asked.runner, suite, config.concurrency, observer)
        observer.note(f"{config.model}: {asked.completer.spent.summary()}")
    return results


async def _run(runner: GroupRunner, suite: Suite, concurrency: int, observer: Observer) -> list[Result]:
    total = len(suite.cells())
    observer.stage("measure", total, "tasks")
    finished = passed = 0

    def on_result(result: Result) -> None:
        nonlocal finished, passed
        finished += 1
        passed += result.passed
        observer.advance(finished, total, passed=f"{passed / finished:.0%}")

    results = await run_suite(runner, suite, label="eval", concurrency=concurrency, on_result=on_result)
    observer.finish("measure")
    return results
