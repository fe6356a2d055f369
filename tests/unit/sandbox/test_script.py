"""A script that runs in a fork of the loaded interpreter behaves as one that an interpreter is started for."""

from __future__ import annotations

import asyncio
import re

import pytest

from lehr.sandbox.base import ExecResult, Limits, Spec
from lehr.sandbox.box import RunnerBox
from lehr.sandbox.bwrap import BwrapBackend
from lehr.sandbox.inside import script

SPEC = Spec(limits=Limits(memory_bytes=256 << 20, wall_s=20.0))
SCRIPTS = {
    "output": "print('out'); import sys; print('err', file=sys.stderr); sys.stdout.buffer.write(b'\\xff\\n')",
    "arguments": "import sys; print(sys.argv, sys.orig_argv[1:])",
    "names": "print(__name__, __doc__, __spec__, __package__, sorted(globals()))",
    "file": "print(__file__); import sys; print(sys.path[0])",
    "path": "import sys; print(sys.path)",
    "streams": "import sys; print([(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.fileno())"
    " for s in (sys.stdin, sys.stdout, sys.stderr)]); print(repr(sys.stdin.read()))",
    "no output flushed late": "import sys; sys.stdout.write('no newline')",
    "exit number": "raise SystemExit(7)",
    "exit large": "import sys; sys.exit(256 + 3)",
    "exit text": "import sys; sys.exit('a reason')",
    "exit none": "import sys; print('x'); sys.exit()",
    "exit true": "import sys; sys.exit(True)",
    "traceback": "def f():\n    return 1 / 0\n\n\nf()\n",
    "chained": "try:\n    {}['k']\nexcept KeyError as e:\n    raise ValueError('v') from e\n",
    "syntax": "x = = 1",
    "indentation": "def f():\nreturn 1",
    "null": "print('a')\nprint('\\u20ac')",
    "interrupted": "raise KeyboardInterrupt",
    "recursion": "def f(): f()\ntry: f()\nexcept RecursionError as e: print('deep')",
    "atexit": "import atexit; atexit.register(print, 'bye'); print('hi')",
    "atexit error": "import atexit; atexit.register(lambda: 1 / 0)",
    "unclosed file": "f = open('left', 'w'); f.write('kept')\n",
    "destructor": "class A:\n    def __del__(self): print('gone')\na = A()\nb = [A()]\nb.append(b)\n",
    "thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "daemon": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "thread error": "import threading\nthreading.Thread(target=lambda: 1 / 0, name='t').start()",
    "signals": "import signal; print([(n, signal.getsignal(n)) for n in (2, 13, 15, 17, 25)])",
    "environment": "import os; print(sorted(os.environ.items()), os.getcwd(), os.umask(0))",
    "builtins": "print([hasattr(__builtins__, n) for n in ('exit', 'quit', 'help', 'copyright')])",
    "modules": "import sys; print([m for m in sys.modules if 'lehr' in m]); import lehr",
    "users": "import os; print(os.getuid(), os.geteuid(), os.getgid(), os.getgroups())",
    "limits": "import resource as r\n"
    "print([r.getrlimit(k) for k in (r.RLIMIT_CORE, r.RLIMIT_NOFILE, r.RLIMIT_CPU)])",
    "descriptors": "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:3])",
    "fork": "import os\npid = os.fork()\nif not pid: os._exit(3)\nprint(os.waitpid(pid, 0)[1] >> 8)",
    "subprocess": "import subprocess as s; print(s.run(['sh', '-c', 'echo in; exit 4'], capture_output=True))",
    "spawned": "import multiprocessing as m\nif __name__ == '__main__':\n    m.set_start_method('spawn')\n"
    "    with m.Pool(1) as p: print(p.map(abs, [-1, -2]))",
    "future": "from __future__ import annotations\ndef f(x: undefined): ...\nprint(f.__annotations__)",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
    "closed stdout": "import sys; sys.stdout.close()",
    "warning": "import warnings; warnings.warn('careful')",
    "logging": "import logging; logging.warning('%s', 'w')",
    "unraisable": "class A:\n    def __del__(self): 1 / 0\nA()\nprint('on')",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 1\nprint(P())",
    "status": "import os; os._exit(9)",
    "abort": "import os; os.abort()",
    "sys exit in thread": "import threading, sys; threading.Thread(target=sys.exit, args=(3,)).start()",
}
FLAGS = ([], ["-I"], ["-I", "-S"], ["-B", "-u"], ["-ISB"])


async def both(box: RunnerBox, arguments: list[str], stdin: bytes = b"") -> tuple[ExecResult, ExecResult]:
    """Run the same command line in a fork, and by an interpreter of its own."""
    forked = await box.exec(["python3", *arguments], stdin=stdin)
    started = await box.exec(["/usr/bin/env", "python3", *arguments], stdin=stdin)
    return forked, started


def seen(result: ExecResult) -> tuple[object, ...]:
    streams = [re.sub(rb"0x[0-9a-f]+", b"0x", stream) for stream in (result.stdout, result.stderr)]
    return result.verdict, result.exit_code, result.signal, *streams


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(flags) or "plain")
def test_same_as_an_interpreter_of_its_own(flags: list[str]) -> None:
    async def run() -> dict[str, tuple[object, object]]:
        backend = BwrapBackend()
        box = await backend.create(SPEC)
        different: dict[str, tuple[object, object]] = {}
        try:
            for name, code in SCRIPTS.items():
                await box.write("folder/script.py", code.encode())
                for kind in (["folder/script.py", "a", "-b"], ["-c", code, "a", "-b"]):
                    if kind[0] != "-c" or name not in ("file", "spawned"):
                        forked, started = await both(box, [*flags, *kind], b"typed\n")
                        if seen(forked) != seen(started):
                            different[f"{name} {kind[0]}"] = (seen(forked), seen(started))
            assert await box.read("left") == b"kept"
        finally:
            await box.destroy()
            await backend.close()
        return different

    different = asyncio.run(run())
    assert not different, "\n".join(f"{name}: {pair[0]} != {pair[1]}" for name, pair in different.items())


def test_what_a_fork_cannot_do_is_executed() -> None:
    folder = script.PROGRAM.rpartition("/")[0]
    own = {"LANG": "C.UTF-8", "PATH": folder}
    argv = ["python3", "-I", "x.py", "-c"]
    assert script.understand(argv, own, own) == script.Invocation(frozenset("I"), None, argv[2:], argv)
    argv = ["python3", "-Ic", "pass", "1"]
    assert script.understand(argv, own, own) == script.Invocation(frozenset("I"), "pass", ["-c", "1"], argv)
    for argv in (["python3"], ["python3", "-"], ["python3", "-m", "x"], ["python3", "-O", "x.py"], ["sh", "x"]):
        assert script.understand(argv, own, own) is None, argv
    for name in ("PYTHONPATH", "LD_PRELOAD", "LC_ALL", "PYTHONHASHSEED"):
        assert script.understand(["python3", "x.py"], {**own, name: "1"}, own) is None, name
    assert script.understand(["python3", "x.py"], {**own, "PATH": "/elsewhere"}, own) is None
    assert script.understand(["python3", "x.py"], {"PATH": folder}, own) is None
