"""Stop strings on the token path: found in the bytes of what was sampled, wherever tokens split them."""

from __future__ import annotations

from collections.abc import Sequence


def find_stop(text: bytes, stops: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Return where the leftmost stop begins in ``text``, and which it is; the longer of two at one place."""
    found = [(at, -len(s), s) for s in stops if s and (at := text.find(s)) >= 0]
    if not found:
        return None
    at, _, stop = min(found)
    return at, stop


def cut(text: str, stops: Sequence[str]) -> str:
    """Return ``text`` up to the leftmost stop."""
    found = find_stop(text.encode(), [s.encode() for s in stops])
    return text if found is None else text.encode()[: found[0]].decode(errors="replace")


def extend_tail(tail: bytes, piece: bytes, stops: Sequence[bytes]) -> tuple[bytes, bool]:
    """Return the bytes to remember after ``piece``, and whether a stop has been completed by it."""
    text = tail + piece
    hit = find_stop(text, stops) is not None
    longest = max(map(len, stops))
    return text[-(longest - 1) :] if longest > 1 else b"", hit
