"""How rollouts enter the record, and come back from it."""

from __future__ import annotations

from lehr.core.errors import Failure
from lehr.core.reward import Valid
from lehr.pipeline.context import Context
from lehr.rollout.base import Group, Judged
from lehr.wire.codec import decode

ENDED_EARLY = "rl.ended_early"
"""The event of a stage that ended before its last step; ``text`` says after how many, and why."""

ALARM = "rl.alarm"
"""The event of an alarming number; see :class:`lehr.train.alarms.Alarm` for its fields."""


def keep_trace(ctx: Context, judged: Judged, *, stage: str, domain: str) -> str:
    """Store a judged trace as a blob, then the row that names it. Returns the blob's digest."""
    blob = ctx.keep(judged)
    trace, reward = judged.trace, judged.reward
    valid = isinstance(reward, Valid)
    ctx.ledger.record_trace(
        trace_id=trace.id,
        group_id=trace.group_id,
        attempt=trace.attempt,
        stage=stage,
        domain=domain,
        task_id=trace.task_id,
        blob=blob,
        valid=valid,
        value=reward.value if isinstance(reward, Valid) else None,
        passed=reward.passed if isinstance(reward, Valid) else False,
        reason="" if isinstance(reward, Valid) else reason_of(reward.reason, trace.failure),
        detail="" if isinstance(reward, Valid) else reward.detail,
        parts=dict(reward.parts) if isinstance(reward, Valid) else {},
        own_tokens=trace.usage.own_tokens,
        prompt_tokens=trace.usage.prompt_tokens,
        turns=sum(len(segment.turns) for segment in trace.segments),
        seconds=sum(span.seconds for span in trace.spans),
    )
    return blob


def reason_of(reason: str, failure: Failure | None) -> str:
    """Return the cause as it is counted: the reward's reason, refined by the failure's code."""
    return f"{reason}:{failure.code}" if failure is not None else reason


def load_group(ctx: Context, group_id: str, domain: str, task_id: str) -> Group:
    """Return a finished group from the record, members in order of their attempts."""
    members = [decode(ctx.blobs.get(blob), Judged) for blob in ctx.ledger.trace_blobs(group_id)]
    members.sort(key=lambda judged: judged.trace.attempt)
    return Group(group_id, domain, task_id, tuple(members))
