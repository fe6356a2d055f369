"""Errors to failures and back, so that ``except RequestTooLarge`` works on the caller's side."""

from __future__ import annotations

from collections.abc import Iterator

from lehr.core.errors import Failure, LehrError


class RemoteError(LehrError, RuntimeError):
    """A failure whose code belongs to no error class that this process has imported."""

    code = "remote"

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        self.code = failure.code
        super().__init__(f"{failure.code}: {failure.detail}")


class BadRequest(LehrError, RuntimeError):
    """A request that the role does not know, or whose body is not what the method takes."""

    code = "bad_request"


def error_of(failure: Failure) -> LehrError:
    """Return the error that ``failure`` names: the class nearest to the root with that ``code``."""
    for kind in _tree(LehrError):
        if kind is not RemoteError and kind.__dict__.get("code") == failure.code:
            error = kind.__new__(kind)
            LehrError.__init__(error, failure.detail or failure.code)
            return error
    return RemoteError(failure)


def _tree(root: type[LehrError]) -> Iterator[type[LehrError]]:
    level = [root]
    while level:
        yield from level
        level = [child for kind in level for child in kind.__subclasses__()]
