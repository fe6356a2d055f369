"""Refusals and failures in the shape that OpenAI's clients know."""

from __future__ import annotations

from typing import Any, cast

from lehr.core.errors import ConfigError, LehrError
from lehr.engine.base import EngineError, RequestTooLarge

NO_RETRY = {"x-should-retry": "false"}
"""Tells OpenAI's clients that asking again at once would end alike."""


class ApiError(Exception):
    """An answer other than 200. ``param`` names the field that is at fault, where one is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return ``{"error": …}``."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def unsupported(param: str, value: object, expected: str) -> ApiError:
    """Return the refusal of an option that would change the result and is not there."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    message = f"{param}={shown} is not supported. Expected {expected}."
    return ApiError(400, message, code="unsupported_parameter", param=param)


def too_long(prompt: int, wanted: int | None, room: int, param: str) -> ApiError:
    """Return the refusal of a prompt, with ``wanted`` new tokens, that the context cannot hold."""
    if wanted is None:
        what = f"the prompt has {prompt} tokens; the context of {room} has no room for an answer"
    else:
        what = f"{prompt} prompt tokens and {wanted} new ones do not fit the context of {room}"
    message = f"{what}. Shorten the prompt{'' if wanted is None else ' or lower max_tokens'}."
    return ApiError(400, message, code="context_length_exceeded", param=param)


def stopping() -> ApiError:
    """Return the answer of a server that is ending."""
    return ApiError(
        503, "the server is shutting down. Ask again once it is back.", code="shutting_down",
        headers={"retry-after": "5", **NO_RETRY},
    )  # fmt: skip


def too_late(limit_s: float) -> ApiError:
    """Return the answer to a request that took too long."""
    message = (
        f"the request took more than {limit_s:g} s. Ask for fewer tokens, or start the server with a larger"
        " --timeout."
    )
    return ApiError(504, message, code="deadline_exceeded", headers=NO_RETRY)


def of(error: BaseException, limit_s: float) -> ApiError | None:
    """Return the answer that tells a client of ``error``; None for a defect of lehr."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        return too_late(limit_s)
    if isinstance(error, RequestTooLarge):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, EngineError):
        return ApiError(500, str(error), code="engine_error", headers=NO_RETRY)
    if isinstance(error, ConfigError):  # the chat template refuses the conversation
        return ApiError(400, str(error), code="invalid_messages", param="messages")
    if isinstance(error, LehrError):
        return ApiError(500, str(error), code=error.code, headers=NO_RETRY)
    return None
