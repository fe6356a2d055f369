"""An ASGI middleware that asks every request but ``/health`` for the token in ``LEHR_SERVER_TOKEN``.

Imports nothing of lehr. Servers guard their public paths only and leave those open that change weights.
"""

import hmac
import os


class TokenGuard:
    """Answers 401 unless a request carries ``Authorization: Bearer TOKEN``."""

    def __init__(self, app):
        self.app = app
        token = os.environ.get("LEHR_SERVER_TOKEN", "")
        if not token:
            raise RuntimeError("LEHR_SERVER_TOKEN is empty")
        self.expected = f"Bearer {token}".encode()

    async def __call__(self, scope, receive, send):
        """Let a request through or refuse it."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] == "/health"):
            await self.app(scope, receive, send)
            return
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if hmac.compare_digest(given, self.expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "the token is wrong or missing"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})
