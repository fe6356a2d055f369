"""Looks, before any long work, whether this machine can do it at all."""

from __future__ import annotations

import asyncio

from lehr.core.errors import HostUnfit, LehrError

BOX_S = 20.0


def require_fit_host(backend: str = "bwrap", *, timeout_s: float = BOX_S) -> None:
    """Run ``true`` in a box. Raises the error that says what is missing and how to mend it."""
    problem = box_problem(backend, timeout_s=timeout_s)
    if problem is not None:
        raise problem


def box_problem(backend: str = "bwrap", *, timeout_s: float = BOX_S) -> LehrError | None:
    """Return why no program can be run in a box here, or None if one can."""
    try:
        return asyncio.run(_try(backend, timeout_s))
    except LehrError as error:
        return error


async def _try(backend: str, timeout_s: float) -> HostUnfit | None:
    from lehr.sandbox.base import Spec
    from lehr.sandbox.pool import Pool

    pool = Pool(backend, warm=0, limit=1)
    try:
        async with pool.lease(Spec(), timeout_s=timeout_s) as box:
            result = await box.exec(["true"])
    finally:
        await pool.close()
    if result.verdict == "ok":
        return None
    return HostUnfit(
        f"a box cannot run `true`: {result.detail or result.verdict} {result.stderr.decode(errors='replace')}",
        hint="`lehr doctor` says what is missing.",
    )
