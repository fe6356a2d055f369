"""What travels between home and a role. A body is a frame of its own behind the envelope.

A role says Hello, builds its service, says Ready (or Refused), answers Requests with Replies, and ends
on Bye. Either side sends Heartbeats. Remaining time travels instead of absolute time: clocks differ.
"""

from __future__ import annotations

import msgspec

from lehr.core.errors import Failure


class Envelope(msgspec.Struct, tag=True, array_like=True):
    """Base of every message."""


class Hello(Envelope):
    """The first message of a role; anything from a peer that has not said it is dropped."""

    role: str
    incarnation: int
    token: str
    pid: int


class Ready(Envelope):
    """The service is built and answers requests."""

    methods: tuple[str, ...]


class Refused(Envelope):
    """The service could not be built; the role ends."""

    failure: Failure


class Request(Envelope):
    """A call. Its argument, if any, is the body."""

    id: str
    method: str
    incarnation: int
    remaining_s: float


class Reply(Envelope):
    """The answer to a request: a body, or a failure."""

    id: str
    failure: Failure | None = None


class Cancel(Envelope):
    """The caller no longer waits; the handler is cancelled and no reply is sent."""

    id: str


class Heartbeat(Envelope):
    """Nothing but a sign of life."""


class Bye(Envelope):
    """From home: end. From a role: it ended as it was told."""


Message = Hello | Ready | Refused | Request | Reply | Cancel | Heartbeat | Bye

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Return the envelope as bytes."""
    return _ENCODER.encode(message)


def unpack(data: bytes | memoryview) -> Message:
    """Return the envelope in ``data``; raises ``msgspec.DecodeError`` for anything else."""
    return _DECODER.decode(data)
