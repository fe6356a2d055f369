"""Every error that lehr raises on purpose.

    LehrError                  what failed, what was expected, what to do next
    ├── ConfigError            (ValueError)   a recipe, option or file that cannot be used
    ├── UnknownName            (LookupError)  a name that is not registered; lists near matches
    ├── MissingDependency      (ImportError)  a package or program to install; names the command
    ├── HostUnfit              (RuntimeError) this machine cannot do it; names the mend
    ├── OutOfSpace             (OSError)      a disk or memory file system is full
    ├── DeadlineExceeded       (TimeoutError) a wait that ran past its deadline
    ├── RoleLost               (RuntimeError) a process of the run ended before its work did
    ├── StaleWriter            (RuntimeError) a fenced writer that another incarnation replaced
    └── Diverged               (ArithmeticError) training produced a value it cannot go on from

Failure travels in two ways. Inside a process it is an exception of this tree. Between processes and in
the record it is a :class:`Failure`, plain data: exceptions never cross a process border. A rollout that
went wrong is neither: it is a trace with a failure, judged ``Invalid`` (see ``core.reward``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


class LehrError(Exception):
    """Base of the tree. ``str(error)`` is one message of up to three sentences."""

    code = "error"
    resumable = True
    """Whether a run that ended with it may go on where it stands."""

    def __init__(self, what: str, *, expected: str = "", hint: str = "") -> None:
        self.what = what
        self.expected = expected
        self.hint = hint
        super().__init__(what, expected, hint)

    def __str__(self) -> str:
        parts = [self.what]
        if self.expected:
            parts.append(f"Expected {self.expected}.")
        if self.hint:
            parts.append(self.hint)
        return " ".join(part if part.endswith((".", "!", "?", "`")) else part + "." for part in parts)


class ConfigError(LehrError, ValueError):
    """A recipe, option or file that cannot be used as it stands."""

    code = "config"


class UnknownName(LehrError, LookupError):
    """A name that nothing is registered under."""

    code = "unknown_name"

    @classmethod
    def among(cls, kind: str, name: str, known: Iterable[str], *, hint: str = "") -> UnknownName:
        """Build the error with the nearest known names, or all of them when they are few."""
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        expected = " or ".join(repr(n) for n in near) if near else f"one of {', '.join(names[:12])}"
        return cls(f"unknown {kind} {name!r}", expected=expected, hint=hint)


class MissingDependency(LehrError, ImportError):
    """A Python package or a program that has to be installed first."""

    code = "missing_dependency"


class HostUnfit(LehrError, RuntimeError):
    """The machine cannot do what was asked."""

    code = "host_unfit"


class OutOfSpace(LehrError, OSError):
    """A file system is full. Whatever was already committed is intact."""

    code = "out_of_space"


class DeadlineExceeded(LehrError, TimeoutError):
    """A wait ended because its deadline passed."""

    code = "deadline"


class RoleLost(LehrError, RuntimeError):
    """A process of the run ended before its work did."""

    code = "role_lost"


class StaleWriter(LehrError, RuntimeError):
    """A write was refused because a newer incarnation owns the record."""

    code = "stale_writer"


class Diverged(LehrError, ArithmeticError):
    """Training produced a value from which it cannot go on."""

    code = "diverged"


@dataclass(frozen=True, slots=True)
class Failure:
    """How failure crosses a process border or enters the record.

    ``code`` is the ``code`` of an error above, or a word of the place where it happened
    (``sandbox``, ``engine``, ``verifier``); ``detail`` is a sentence for a person.
    """

    code: str
    detail: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure that describes ``error``."""
        code = error.code if isinstance(error, LehrError) else type(error).__name__
        return cls(code, str(error) or type(error).__name__)
