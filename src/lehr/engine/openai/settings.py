"""Which model, where, and how much may be asked of it; readable without the client."""

from __future__ import annotations

import ipaddress
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from lehr.core.config import Config, Count
from lehr.core.errors import ConfigError

PREFIX = "openai:"
DEFAULT_URL = "https://api.openai.com/v1"
OWN = frozenset({"model", "messages", "stream", "n", "max_tokens", "max_completion_tokens"})
"""Fields of a request that the completer fills in itself."""

Option = Literal["temperature", "top_p", "stop", "seed"]


class Prices(Config):
    """Money for a million tokens, in any one currency."""

    prompt: float = Field(ge=0)
    cached: float | None = Field(default=None, ge=0)
    """Of prompt tokens that the server had cached; the default is the price of the others."""
    completion: float = Field(ge=0)


class OpenAIConfig(Config):
    """A model behind an OpenAI-compatible API."""

    model: str = Field(min_length=1)
    """The name that the server knows it by."""
    base_url: str = DEFAULT_URL
    """The address that ``/chat/completions`` follows."""
    key_env: str = Field(default="", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$|^$")
    """The environment variable that holds the key. By default ``OPENAI_API_KEY`` for OpenAI itself and
    ``LEHR_API_KEY`` for any other address, so that no key goes to a server that it was not meant for."""
    concurrency: Count = 8
    """Requests at once."""
    requests_per_minute: float = Field(default=0, ge=0)
    """0 is no limit."""
    tokens_per_minute: float = Field(default=0, ge=0)
    """Prompt and answer together; 0 is no limit. A request is estimated before, and counted after."""
    timeout_s: float = Field(default=600.0, gt=0)
    """For a request with its waits and retries."""
    attempt_timeout_s: float = Field(default=180.0, gt=0)
    """For one attempt."""
    retries: int = Field(default=6, ge=0, le=100)
    """Attempts after the first, where the failure may pass."""
    backoff_s: float = Field(default=1.0, gt=0)
    """Before the first retry; doubles with each, up to a minute. A server's Retry-After counts where it is
    longer."""
    length_field: Literal["auto", "max_tokens", "max_completion_tokens"] = "auto"
    """How the API names the token limit; ``auto`` is ``max_completion_tokens`` for OpenAI itself."""
    leave_out: tuple[Option, ...] = ()
    """Options never to send, for models that refuse them."""
    extra: dict[str, Any] = Field(default_factory=dict[str, Any])
    """More fields of the request, such as ``reasoning_effort``."""
    prices: Prices | None = None
    """With them, costs are counted."""

    @field_validator("base_url")
    @classmethod
    def _usable(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{value!r} is no address of an API; expected http:// or https:// and a host")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("an address may hold no password, query or fragment; the key is given by key_env")
        return value.rstrip("/")

    @field_validator("extra")
    @classmethod
    def _foreign(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(OWN & value.keys()):
            raise ValueError(f"{', '.join(taken)} cannot be set here: lehr fills it in")
        return value

    @property
    def is_default_host(self) -> bool:
        """Whether this is OpenAI itself."""
        return self.base_url == DEFAULT_URL

    @property
    def key_variable(self) -> str:
        """The name of the environment variable that the key is read from."""
        return self.key_env or ("OPENAI_API_KEY" if self.is_default_host else "LEHR_API_KEY")

    @property
    def is_private(self) -> bool:
        """Whether nobody on the way can read what is sent: encrypted, or to this machine."""
        parts = urlsplit(self.base_url)
        if parts.scheme == "https" or parts.hostname == "localhost":
            return True
        try:
            return ipaddress.ip_address(parts.hostname or "").is_loopback
        except ValueError:
            return False

    @property
    def limit_name(self) -> str:
        """The request's field for the token limit."""
        if self.length_field != "auto":
            return self.length_field
        return "max_completion_tokens" if self.is_default_host else "max_tokens"


def parse_name(text: str) -> dict[str, Any]:
    """Return the settings in ``openai:NAME`` or ``openai:NAME@BASE_URL``. Raises :class:`ConfigError`."""
    rest = text.removeprefix(PREFIX)
    name, at, address = rest.rpartition("@")
    if not at:
        name, address = rest, ""
    if not name or (at and "://" not in address):
        raise ConfigError(
            f"cannot read the model {text!r}",
            expected=f"{PREFIX}NAME or {PREFIX}NAME@BASE_URL, such as {PREFIX}tiny@http://127.0.0.1:8000/v1",
        )
    return {"model": name} | ({"base_url": address} if at else {})
