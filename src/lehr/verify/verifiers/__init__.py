"""The verifiers that come with lehr, one file each."""

from __future__ import annotations

from lehr.core.registry import Registry
from lehr.verify.base import Verifier
from lehr.verify.verifiers.answer import match_answer
from lehr.verify.verifiers.fields import match_fields
from lehr.verify.verifiers.state import match_state
from lehr.verify.verifiers.static_checks import run_static_checks
from lehr.verify.verifiers.unit_tests import run_unit_tests

BUILTIN: dict[str, Verifier] = {
    "run_unit_tests": run_unit_tests,
    "run_static_checks": run_static_checks,
    "match_fields": match_fields,
    "match_state": match_state,
    "match_answer": match_answer,
}


def register(registry: Registry[Verifier]) -> None:
    """Register all of them."""
    for name, verifier in BUILTIN.items():
        registry.register(name, verifier)
