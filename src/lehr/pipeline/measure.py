"""Measures the weights in force on held-out tasks and records each result as it comes."""

from __future__ import annotations

from lehr.core.task import Split
from lehr.evals.suite import Result, Suite, run_suite, tally
from lehr.pipeline.context import Context
from lehr.pipeline.records import keep_trace


async def measure(
    ctx: Context, label: str, *, split: Split, count: int, record: bool = True
) -> dict[str, float]:
    """Return the pass rate per domain. With ``record``, each result enters the ledger under ``label`` and
    tasks already there are skipped, so that a resumed measurement goes on where it was.
    """
    await ctx.allot(engine=ctx.division.sampling)
    suite = Suite(ctx.domains, split, count, ctx.recipe.seed)
    total = len(suite.cells())
    done = ctx.ledger.evaluated(label) if record else {}
    before = dict(done)
    ctx.observer.stage(f"measure {label}", total, "tasks")
    passed = sum(done.values())
    finished = len(done)
    ctx.observer.advance(finished, total)
    busy_s, verified_s = (await ctx.engine.stats()).busy_s, ctx.verifying.seconds

    def on_result(result: Result) -> None:
        nonlocal finished, passed
        finished += 1
        passed += result.passed
        if record:
            blob = keep_trace(ctx, result.judged, stage=label, domain=result.domain)
            ctx.ledger.record_evaluation(
                label=label,
                domain=result.domain,
                task_id=result.task_id,
                trace_id=result.judged.trace.id,
                passed=result.passed,
                valid=result.valid,
                blob=blob,
            )
        ctx.observer.advance(finished, total, passed=f"{passed / max(1, finished):.0%}")

    results = await run_suite(
        ctx.runner,
        suite,
        label=label,
        concurrency=ctx.recipe.evaluation.concurrency,
        on_result=on_result,
        skip=set(before),
        sampling=ctx.greedy,
    )
    ctx.metrics.write(
        f"measure {label}",
        ctx.published,
        {
            "time/sampling_s": (await ctx.engine.stats()).busy_s - busy_s,
            "time/verifying_s": ctx.verifying.seconds - verified_s,
        },
    )
    rates = {name: passed / total for name, (passed, total) in tally(results).items()}
    ctx.observer.finish(f"measure {label}", **{name: f"{rate:.0%}" for name, rate in rates.items()})
    return rates
