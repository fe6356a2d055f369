"""Running a Python script in a fork of the interpreter that is loaded already, as a new interpreter would.

Only what a fork can do faithfully is taken over: ``python3 [-I] [-S] [-s] [-E] [-B] [-u] SCRIPT|-c CODE``, by
the same interpreter, in an environment that does not steer interpreters. Everything else is executed as asked.
What differs: ``sys.flags`` are those of a plain start, modules that were loaded beforehand are in
``sys.modules``, hash seed and address layout are the image's, and two frames lie below the script's.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import stat
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import Any, NamedTuple, NoReturn

LETTERS = frozenset("ISsEBu")
STEERING = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "GCONV_", "LOCPATH")
MOST_BYTES = 8 << 20
INTERRUPTED = -2
PROGRAM = sys.executable
SITE_BUILTINS = ("copyright", "credits", "exit", "help", "license", "quit")


class Invocation(NamedTuple):
    """A command line that can be taken over.

    flags: single letters. code: what follows ``-c``, or None. argv: ``sys.argv`` as the script will see it.
    written: the whole command line.
    """

    flags: frozenset[str]
    code: str | None
    argv: list[str]
    written: Sequence[str]


class Script(NamedTuple):
    """A compiled script, or the error that compiling it gave, with all that it needs to run as ``__main__``.

    plain_path: ``sys.path`` of an interpreter without site packages. hidden: modules that a new interpreter
    would not have.
    """

    code: types.CodeType | None
    error: BaseException | None
    invocation: Invocation
    file: str | None
    env: Mapping[str, str]
    plain_path: Sequence[str] = ()
    hidden: Sequence[str] = ()


def understand(argv: Sequence[str], env: Mapping[str, str], own_env: Mapping[str, str]) -> Invocation | None:
    """Return how ``argv`` can be taken over, or None if it has to be executed."""
    name = argv[0]
    if os.path.basename(name) not in _NAMES or not PROGRAM:
        return None
    found = name if "/" in name else _which(name, env.get("PATH", ""))
    if found is None or os.path.dirname(found) != os.path.dirname(PROGRAM):
        return None
    if any(key.startswith(STEERING) and own_env.get(key) != value for key, value in env.items()):
        return None
    if any(key not in env for key in own_env if key.startswith(STEERING)):
        return None
    flags: set[str] = set()
    rest = list(argv[1:])
    while rest and rest[0].startswith("-") and len(rest[0]) > 1:
        letters = rest.pop(0)[1:]
        plain, dash, code = letters.partition("c")
        if not set(plain) <= LETTERS:
            return None
        flags |= set(plain)
        if dash:
            if not code and not rest:
                return None
            return Invocation(frozenset(flags), code or rest.pop(0), ["-c", *rest], argv)
    if not rest or rest[0] == "-":
        return None
    return Invocation(frozenset(flags), None, rest, argv)


def _which(name: str, path: str) -> str | None:
    for folder in path.split(":"):
        candidate = os.path.join(folder or ".", name)
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    return None


_NAMES = {"python3", f"python3.{sys.version_info[1]}"}


def load(invocation: Invocation, env: Mapping[str, str]) -> Script | None:
    """Read and compile, as the candidate and in its folder; None if it has to be executed after all."""
    version = f"python3.{sys.version_info[1]}"
    home = env.get("HOME", "")
    if not invocation.flags & {"I", "s"} and os.path.exists(f"{home}/.local/lib/{version}/site-packages"):
        return None
    file, name, source = None, "<string>", b""
    if invocation.code is None:
        name = file = os.path.join(os.getcwd(), invocation.argv[0])
        try:
            source = _source(file)
        except OSError:
            return None
        if source.startswith(b"PK") or b"\0" in source:
            return None
    else:
        source = invocation.code.encode("utf-8", "surrogateescape") + b"\n"
    try:
        return Script(compile(source, name, "exec", dont_inherit=True), None, invocation, file, env)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError) as error:
        return Script(None, error.with_traceback(None), invocation, file, env)


def _source(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as handle:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > MOST_BYTES:
            raise OSError("not a script")
        return handle.read(MOST_BYTES)


def run(script: Script) -> NoReturn:
    """Become ``python3`` that runs ``script``, to its end."""
    flags = script.invocation.flags
    if os.environ != script.env:
        os.environ.clear()
        os.environ.update(script.env)
        time.tzset()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _streams(unbuffered="u" in flags)
    sys.argv[:] = script.invocation.argv
    sys.orig_argv[:] = script.invocation.written
    sys.dont_write_bytecode = "B" in flags
    if "S" in flags:
        sys.path[:] = script.plain_path
        sys.modules.pop("site", None)
        for name in SITE_BUILTINS:
            vars(sys.modules["builtins"]).pop(name, None)
    else:
        sys.path[:] = [entry for entry in sys.path if entry]
    if "I" not in flags:
        sys.path.insert(0, os.path.dirname(_resolved(script.file)) if script.file else "")
    for name in script.hidden:
        sys.modules.pop(name, None)
    main = types.ModuleType("__main__")
    space: dict[str, Any] = main.__dict__
    space["__builtins__"] = sys.modules["builtins"]
    space["__annotations__"] = {}
    if script.file is not None:
        space["__file__"] = script.file
        space["__cached__"] = None
        space["__loader__"] = SourceFileLoader("__main__", script.file)
    else:
        space["__loader__"] = BuiltinImporter
    sys.modules["__main__"] = main
    known = set(sys.modules)
    try:
        if script.error is not None:
            raise script.error
        exec(script.code, space)  # type: ignore[arg-type]
        status = 0
    except SystemExit as end:
        status = _status_of(end)
    except BaseException as error:
        inner = error.__traceback__.tb_next if script.code and error.__traceback__ else None
        error.__traceback__ = inner
        sys.excepthook(type(error), error, inner)
        status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    _finish(status, [name for name in sys.modules if name not in known or name == "__main__"])


def _status_of(end: SystemExit) -> int:
    """Return the exit status of a ``SystemExit``, printing what is not a number, as the interpreter does."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    with contextlib.suppress(Exception):
        print(end.code, file=sys.stderr)
    return 1


def _finish(status: int, modules: list[str]) -> NoReturn:
    """End as an interpreter does: threads, exit functions, destructors of what the script made, streams.

    The modules that were there before stay as they are: taking them apart would copy every page of them.
    """
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
    _flush(status)
    for name in modules:
        module = sys.modules.get(name)
        if isinstance(module, types.ModuleType):
            space = module.__dict__
            for private in (True, False):
                for key in [key for key in space if key.startswith("_") == private and key != "__builtins__"]:
                    space[key] = None
    gc.collect()
    status = _flush(status)
    if status == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _flush(status: int) -> int:
    """Flush the standard streams; return the status, 120 if what was written to stdout cannot be kept."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except BaseException as error:
            if name == "stdout":
                status = 120
                with contextlib.suppress(Exception):
                    print(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}", file=sys.stderr)
    return status


def _resolved(path: str) -> str:
    return os.path.join(os.path.dirname(path), os.readlink(path)) if os.path.islink(path) else path


def _streams(*, unbuffered: bool) -> None:
    """Open the standard streams anew: what they are connected to has changed."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, f"__{name}__")
        writes = fd > 0
        raw_only = unbuffered and writes
        binary: Any = open(fd, "wb" if writes else "rb", 0 if raw_only else -1, closefd=False)  # noqa: SIM115
        (binary if raw_only else binary.raw).name = f"<{name}>"
        text = io.TextIOWrapper(
            binary,
            old.encoding,
            old.errors,
            "\n",
            line_buffering=fd == 2 and not raw_only,
            write_through=raw_only,
        )
        text.mode = "w" if writes else "r"  # type: ignore[misc]
        for place in (name, f"__{name}__"):
            setattr(sys, place, text)
