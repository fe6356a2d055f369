"""JSON over HTTP to one server, with a deadline on every request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import httpx2

from lehr.core.errors import DeadlineExceeded, RoleLost
from lehr.engine.base import EngineError

CONTROL_S = 60.0
"""Deadline of requests that no forward pass is needed for."""


class Server:
    """One server's address and token. Use it in one event loop; :meth:`close` when done.

    name: how messages call it. A refused or broken connection raises ``RoleLost``, a status of 400 and up
    :class:`EngineError` with what the server said, silence ``DeadlineExceeded``.
    """

    def __init__(self, name: str, url: str, token: str = "") -> None:
        self.name, self.url, self.token = name, url.rstrip("/"), token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # The server is addressed as it is: a proxy for the outer world must not see its token.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx2.AsyncClient(base_url=self.url, headers=headers, limits=limits, trust_env=False)

    async def get(self, path: str, *, timeout_s: float = CONTROL_S, **query: Any) -> Any:
        """Return the decoded answer."""
        return self._decoded(path, await self._send("GET", path, None, query, timeout_s))

    async def text(
        self,
        path: str,
        *,
        post: bool = False,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = CONTROL_S,
    ) -> str:
        """Return the answer as it is."""
        method = "POST" if post else "GET"
        return (await self._send(method, path, body, {}, timeout_s)).text

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = CONTROL_S, **query: Any
    ) -> Any:
        """Send ``body`` as JSON and return the decoded answer, None where it is empty."""
        return self._decoded(path, await self._send("POST", path, body or {}, query, timeout_s))

    async def close(self) -> None:
        """Close connections."""
        await self._client.aclose()

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, Any], timeout_s: float
    ) -> httpx2.Response:
        params = {k: str(v).lower() if isinstance(v, bool) else v for k, v in query.items()}
        try:
            response = await self._client.request(method, path, json=body, params=params, timeout=timeout_s)
        except httpx2.TimeoutException as error:
            raise DeadlineExceeded(f"{self.name} at {self.url}{path} took more than {timeout_s:g} s") from error
        except httpx2.HTTPError as error:
            raise RoleLost(
                f"{self.name} at {self.url} cannot be reached: {error!r:.200}",
                hint="Look at the server's log; a dead server has to be started again.",
            ) from error
        if response.status_code == 401:
            raise EngineError(f"{self.name} at {self.url} refused the token", expected="the server's token")
        if response.status_code >= 400:
            said = _said(response)
            raise EngineError(f"{self.name} answered {path} with {response.status_code}: {said}")
        return response

    def _decoded(self, path: str, response: httpx2.Response) -> Any:
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise EngineError(
                f"{self.name} answered {path} with {response.text!r:.200}", expected="JSON"
            ) from error


def _said(response: httpx2.Response) -> str:
    """Return the message in an error's body, in the shapes that servers use."""
    try:
        body: Any = response.json()
    except ValueError:
        return response.text[:500]
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = cast("dict[str, Any]", body)[key]
    return str(body)[:500]
