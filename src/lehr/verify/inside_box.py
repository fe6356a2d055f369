"""Runs a candidate's function inside the box and reports what it returned, call by call.

This file is sent into the box as program text, so it is self-contained standard library. The process
that reads the request never runs candidate code: each call is made in a forked child of its own, so
that a call which exits, crashes or hangs loses only its own result. Expected values never come here:
results go back encoded, and the host compares them. A candidate that takes over everything in this box
can therefore forge outputs only, which is the same as computing them.

The host imports :func:`encode` and :func:`decode` for its end of the exchange.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any, cast

MAX_DEPTH = 40
RESULT_BYTES = 64 << 10
HANGS_ALLOWED = 2
PR_SET_DUMPABLE = 4
PATHS: list[str] = []
"""Where calls, and only they, find more modules: after those of the interpreter."""


def encode(value: Any, depth: int = 0) -> list[Any]:
    """Return ``value`` as tagged JSON that keeps exact types. Raises TypeError for anything that is not a
    plain built-in value; subclasses are not plain.
    """
    kind = cast("type[Any]", type(value))
    if depth > MAX_DEPTH:
        raise TypeError("nested too deeply")
    if value is None:
        return ["n"]
    if kind is bool:
        return ["b", 1 if value else 0]
    if kind is int:
        return ["i", hex(value)]
    if kind is float:
        return ["f", value.hex()]
    if kind is str:
        return ["s", value]
    if kind is bytes:
        return ["y", value.hex()]
    if kind is list or kind is tuple or kind is set or kind is frozenset:
        tag = {list: "l", tuple: "t", set: "e", frozenset: "z"}[kind]
        return [tag, [encode(item, depth + 1) for item in value]]
    if kind is dict:
        return ["d", [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]]
    raise TypeError(f"a {kind.__name__} is not a plain value")


def decode(data: Any, depth: int = 0) -> Any:
    """Invert :func:`encode`. Raises ValueError for anything that it would not have written."""
    if depth > MAX_DEPTH or type(data) is not list or not data:
        raise ValueError("malformed value")
    parts = cast("list[Any]", data)
    tag, rest = parts[0], parts[1:]
    if tag == "n" and not rest:
        return None
    if len(rest) != 1:
        raise ValueError("malformed value")
    body: Any = rest[0]
    if tag == "b" and type(body) is int:
        return bool(body)
    if tag in ("i", "f", "s", "y") and type(body) is str:
        if tag == "i":
            return int(body, 16)
        if tag == "f":
            return float.fromhex(body)
        return body if tag == "s" else bytes.fromhex(body)
    if tag in ("l", "t", "e", "z") and type(body) is list:
        items = [decode(item, depth + 1) for item in cast("list[Any]", body)]
        try:
            return {"l": list, "t": tuple, "e": set, "z": frozenset}[tag](items)
        except TypeError as error:
            raise ValueError("malformed value") from error
    if tag == "d" and type(body) is list:
        try:
            return {decode(k, depth + 1): decode(v, depth + 1) for k, v in cast("list[Any]", body)}
        except TypeError as error:
            raise ValueError("malformed value") from error
    raise ValueError("malformed value")


def main() -> None:
    """Read a request from stdin, run every call, write one line per call to the real stdout."""
    request = json.load(sys.stdin)
    _close_proc()
    nonce = request["nonce"]
    if request["surroundings"]:
        PATHS.extend([os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))])
    out = os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    _say(out, [nonce, "ready", ""])
    try:
        code = compile(request["source"], "solution.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        _say(out, [nonce, "syntax", type(error).__name__])
        return
    hangs = 0
    for number, arguments in enumerate(request["calls"]):
        status, detail = _call(code, request["entry"], arguments, out, request["call_s"], request["wall_s"])
        _say(out, [nonce, number, status, detail])
        hangs += status == "hang"
        if hangs >= HANGS_ALLOWED:
            return


def _close_proc() -> None:
    """Keep calls, which may run as the same user, from reopening this process's descriptors in /proc."""
    import ctypes

    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError("the kernel does not let this process close its /proc entry")


def _say(descriptor: int, line: list[Any]) -> None:
    data = (json.dumps(line) + "\n").encode()
    while data:
        data = data[os.write(descriptor, data) :]


def _call(code: Any, entry: str, arguments: Any, out: int, call_s: int, wall_s: float) -> tuple[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.close(out)
        _candidate(code, entry, arguments, writer, call_s)
    os.close(writer)
    data, hung = _receive(reader, time.monotonic() + wall_s)
    os.close(reader)
    for kill in (os.killpg, os.kill):
        try:  # noqa: SIM105 (contextlib would double the start-up time)
            kill(child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    _, status = os.waitpid(child, 0)
    if not data.endswith(b"\n"):
        cpu = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
        return ("hang", "") if hung or cpu else ("lost", "the call ended without a result")
    try:
        kind, body = json.loads(data)
    except (ValueError, TypeError, RecursionError):
        return ("lost", "the call wrote a malformed result")
    return (kind, body) if kind in ("value", "raised", "odd") else ("lost", "malformed")


def _receive(reader: int, until: float) -> tuple[bytes, bool]:
    data = b""
    while len(data) <= RESULT_BYTES and not data.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            return data, True
        piece = os.read(reader, 65536)
        if not piece:
            break
        data += piece
    return data[: RESULT_BYTES + 1], False


def _candidate(code: Any, entry: str, arguments: Any, writer: int, call_s: int) -> None:
    import resource

    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (call_s, call_s + 1))
        sys.path += PATHS
        scope: dict[str, Any] = {"__name__": "solution", "__builtins__": __builtins__}
        exec(code, scope)
        value = scope[entry](*[decode(item) for item in arguments])
        try:
            answer = ["value", encode(value)]
        except (TypeError, RecursionError) as error:
            answer = ["odd", str(error)]
    except BaseException as error:
        answer = ["raised", type(error).__name__]
    data = json.dumps(answer).encode()
    if len(data) >= RESULT_BYTES:
        data = json.dumps(["odd", "the result is too large"]).encode()
    _say_bytes(writer, data + b"\n")
    os._exit(0)


def _say_bytes(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
