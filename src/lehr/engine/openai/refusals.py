"""What came back instead of an answer: whether it may pass, when to ask again, and what to tell a person."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, cast

from lehr.core.completer import AnswerError, NoAccess
from lehr.engine.openai.settings import OpenAIConfig

PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
"""Statuses after which the same request may be answered."""
CLOSED = frozenset({401, 402, 403, 404})
SPENT = frozenset({"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"})
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Refusal:
    """An attempt that failed.

    kind: the status, or a word. passing: whether to ask again. retry_after_s: not before; None where the server
    does not say.
    """

    kind: str
    message: str
    passing: bool
    status: int | None = None
    code: str = ""
    retry_after_s: float | None = None

    def __str__(self) -> str:
        return f"status {self.status}: {self.message}" if self.status else f"{self.kind}: {self.message}"


def of_status(status: int, headers: Mapping[str, str], body: str) -> Refusal:
    """Return the refusal in an HTTP answer other than 2xx."""
    message, code = _said(body)
    passing = status in PASSING and code not in SPENT
    told = headers.get("x-should-retry", "").lower()
    passing = passing if told not in ("true", "false") else told == "true" and code not in SPENT
    return Refusal(str(status), message, passing, status, code, retry_after_s(headers))


def retry_after_s(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Return what ``Retry-After`` asks for, as seconds or as a date; None where it is missing or unreadable."""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * scale
        except ValueError:
            continue
        return seconds if 0 <= seconds < float("inf") else None
    try:
        date = parsedate_to_datetime(headers.get("retry-after", ""))
        return max(0.0, date.timestamp() - (time.time() if now is None else now))
    except (TypeError, ValueError, OverflowError):
        return None


def error_of(refusal: Refusal, config: OpenAIConfig, attempts: int, *, has_key: bool) -> AnswerError:
    """Return what to raise for the last refusal of a request."""
    where = f"{config.model} at {config.base_url}"
    tries = f" after {attempts} attempts" if attempts > 1 else ""
    what = f"no answer from {where}{tries}: {refusal}"
    closed = refusal.status in CLOSED or refusal.code in SPENT
    kind = NoAccess if closed and not refusal.passing else AnswerError
    return kind(what, hint=_hint(refusal, config, has_key), status=refusal.status)


def _hint(refusal: Refusal, config: OpenAIConfig, has_key: bool) -> str:
    name = config.key_variable
    if refusal.status in (401, 403):
        return f"Check the key in {name}." if has_key else f"Put the key into the environment variable {name}."
    if refusal.status == 404:
        return "Check the model's name and the address: most end with /v1."
    if refusal.status == 402 or refusal.code in SPENT:
        return "Look at the account's credit and limits."
    if refusal.status == 429:
        return "Lower concurrency, or set requests_per_minute or tokens_per_minute."
    if refusal.code in ("unsupported_parameter", "unsupported_value", "unknown_parameter"):
        return "Name the option in leave_out, or take another length_field."
    if refusal.code == "context_length_exceeded":
        return "Shorten the conversation or lower max_tokens."
    if refusal.status is None:
        return "See whether the server runs and the address is right."
    return "" if refusal.status < 500 else "The server's own log may say more."


def _said(body: str) -> tuple[str, str]:
    """Return the message and the code in the body of a refusal."""
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        fields = cast("dict[str, Any]", found)
        inner: Any = fields.get("error", fields)
        if isinstance(inner, dict):
            named = cast("dict[str, Any]", inner)
            message = named.get("message") or named.get("detail")
            code = named.get("code") or named.get("type") or ""
            if isinstance(message, str):
                return _short(message), code if isinstance(code, str) else ""
        elif isinstance(inner, str):
            return _short(inner), ""
    return _short(body) or "no explanation", ""


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
