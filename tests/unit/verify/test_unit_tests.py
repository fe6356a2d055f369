"""A candidate that games its judge must not score; each attack runs in a real box."""

from __future__ import annotations

from typing import Any

from lehr.core.reward import Invalid, Valid

DOUBLES = [((n,), 2 * n) for n in range(4)]


def value(reward: Any) -> float:
    assert isinstance(reward, Valid), reward
    return reward.value


def test_right_and_wrong_code(judge_code: Any) -> None:
    good = judge_code("def f(x):\n    return x * 2\n", DOUBLES)
    assert value(good) == 1.0 and good.passed
    assert value(judge_code("def f(x):\n    return x * 3\n", DOUBLES)) == 0.25
    assert value(judge_code("def f(x:\n", DOUBLES)) == 0.0
    assert value(judge_code("def g(x):\n    return x * 2\n", DOUBLES)) == 0.0


def test_v1_own_copy_of_the_tests(judge_code: Any) -> None:
    source = (
        "import os, pathlib\n"
        "for p in pathlib.Path('/work').rglob('*'):\n    p.is_file() and p.write_text('[]')\n"
        "pathlib.Path('tests.json').write_text('[{\"args\": [0], \"want\": 7}]')\n"
        "def f(x):\n    return 7\n"
    )
    files = {"tests.json": b'[{"args": [0], "want": 7}]', "tests/test_solution.py": b"def test_f(): pass\n"}
    reward = judge_code(source, DOUBLES, files=files)
    assert value(reward) == 0.0


def test_v2_no_code_of_the_working_folder_is_loaded(judge_code: Any) -> None:
    hook = b"import builtins\nbuiltins.f_answer = lambda x: x * 2\n"
    files = {name: hook for name in ("conftest.py", "sitecustomize.py", "usercustomize.py", "helper.py")}
    files |= {"pytest.ini": b"[pytest]\naddopts = --collect-only\n", "x.pth": b"import helper\n"}
    source = (
        "import pathlib\n"
        "for name in ('helper', 'bisect'):\n"
        "    pathlib.Path(name + '.py').write_text('def f_answer(x): return x * 2')\n"
        "def f(x):\n"
        "    import bisect, builtins\n"
        "    if hasattr(builtins, 'f_answer'):\n        return x * 2\n"
        "    if hasattr(bisect, 'f_answer'):\n        return bisect.f_answer(x)\n"
        "    import helper\n"
        "    return helper.f_answer(x)\n"
    )
    assert value(judge_code(source, DOUBLES[1:], files=files)) == 0.0


def test_v3_leaving_early_passes_nothing(judge_code: Any) -> None:
    for leave in ("import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit(0)"):
        assert value(judge_code(f"{leave}\ndef f(x):\n    return x * 2\n", DOUBLES)) == 0.0, leave
        assert value(judge_code(f"def f(x):\n    {leave}\n", DOUBLES)) == 0.0, leave
    hooked = "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x):\n    raise SystemExit(0)\n"
    assert value(judge_code(hooked, DOUBLES)) == 0.0
    lazy = (
        "class Any:\n    def __eq__(self, other):\n        raise SystemExit(0)\n    __hash__ = None\n"
        "def f(x):\n    return Any()\n"
    )
    assert value(judge_code(lazy, DOUBLES)) == 0.0
    parent = "import os, signal\ndef f(x):\n    os.kill(os.getppid(), signal.SIGKILL)\n    return x * 2\n"
    assert value(judge_code(parent, DOUBLES)) <= 0.25


def test_v4_reward_files_are_ignored(judge_code: Any) -> None:
    source = (
        "import os, time\n"
        "def write():\n"
        "    os.makedirs('logs/verifier', exist_ok=True)\n"
        "    for path in ('reward.txt', 'reward.json', 'logs/verifier/reward.txt'):\n"
        "        open(path, 'w').write('1.0' if path.endswith('txt') else '{\"reward\": 1.0}')\n"
        "write()\n"
        "def f(x):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        while True:\n"
        "            write(); time.sleep(0.05)\n"
        "    return x * 3\n"
    )
    files = {"reward.txt": b"1.0", "reward.json": b'{"reward": 1.0}', "logs/verifier/reward.txt": b"1.0"}
    assert value(judge_code(source, DOUBLES[1:], files=files)) == 0.0


def test_v5_printed_verdicts_are_ignored(judge_code: Any) -> None:
    """The candidate prints to every descriptor it has or can reopen, with every nonce that it can find."""
    source = (
        "import json, os, sys\n"
        "def nonces():\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        yield from (v for v in frame.f_locals.values() if type(v) is str and len(v) == 32)\n"
        "        frame = frame.f_back\n"
        "    yield 'guess'\n"
        "def f(x):\n"
        "    text = '12 passed' + chr(10)\n"
        "    for nonce in nonces():\n"
        "        for n in range(4):\n"
        "            text += json.dumps([nonce, n, 'value', ['i', hex(2 * n)]]) + chr(10)\n"
        "    print(text, flush=True)\n"
        "    for fd in range(64):\n"
        "        for path in (f'/proc/self/fd/{fd}', f'/proc/{os.getppid()}/fd/{fd}'):\n"
        "            try:\n                open(path, 'w').write(text)\n"
        "            except OSError:\n                pass\n"
        "        try:\n            os.write(fd, text.encode())\n"
        "        except OSError:\n            pass\n"
        "    os._exit(0)\n"
    )
    assert value(judge_code(source, DOUBLES)) == 0.0


def test_v6_results_are_compared_by_exact_type_outside(judge_code: Any) -> None:
    equal = (
        "class All(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def f(x):\n    return All(x)\n"
    )
    assert value(judge_code(equal, DOUBLES)) == 0.0
    sub = "class Text(str):\n    pass\ndef f(x):\n    return Text('a')\n"
    assert value(judge_code(sub, [((0,), "a")])) == 0.0
    assert value(judge_code("def f(x):\n    return True\n", [((0,), 1)])) == 0.0
    assert value(judge_code("def f(x):\n    return 2.0\n", [((0,), 2)])) == 0.0
    assert value(judge_code("def f(x):\n    return (1, 2)\n", [((0,), [1, 2])])) == 0.0
    assert value(judge_code("def f(x):\n    return {'a': True}\n", [((0,), {"a": 1})])) == 0.0
    assert value(judge_code("def f(x):\n    return float('nan')\n", [((0,), float("nan"))])) == 0.0
    mutates = "def f(xs):\n    xs.append(9)\n    return xs\n"
    shared = [1]
    assert value(judge_code(mutates, [((shared,), [1]), ((shared,), [1])])) == 0.0


def test_v7_expected_values_never_enter_the_box(judge_code: Any) -> None:
    source = (
        "import gc, glob, os, re, sys\n"
        "PATTERN = re.compile('S3CRET-[0-9]+')\n"
        "def texts():\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        yield repr(frame.f_locals); yield repr(frame.f_globals)\n"
        "        frame = frame.f_back\n"
        "    for thing in gc.get_objects():\n"
        "        if type(thing) in (list, dict, tuple):\n            yield repr(thing)\n"
        "    yield repr(os.environ); yield repr(sys.argv)\n"
        "    paths = glob.glob('/work/**', recursive=True) + glob.glob('/tmp/**', recursive=True)\n"
        "    for path in [*paths, *glob.glob('/proc/*/cmdline'), *glob.glob('/proc/*/environ')]:\n"
        "        try:\n            yield open(path, errors='replace').read()\n"
        "        except OSError:\n            pass\n"
        "def f(x):\n"
        "    for text in texts():\n"
        "        found = PATTERN.search(text)\n"
        "        if found:\n            return found[0]\n"
    )
    assert value(judge_code(source, [(("go",), "S3CRET-4711")])) == 0.0


def test_v12_a_hang_is_the_candidates_fault(judge_code: Any) -> None:
    reward = judge_code("def f(x):\n    while x > 1:\n        pass\n    return x * 2\n", DOUBLES)
    assert value(reward) == 0.5


def test_v22_a_crash_does_not_shrink_the_denominator(judge_code: Any) -> None:
    tests = [((n,), n) for n in range(12)]
    source = "import os\ndef f(x):\n    if x == 5:\n        os.abort()\n    return x\n"
    assert value(judge_code(source, tests)) == 11 / 12
    raising = "def f(x):\n    return x if x != 5 else 1 // 0\n"
    assert value(judge_code(raising, tests)) == 11 / 12


def test_v24_long_integers_compare(judge_code: Any) -> None:
    assert value(judge_code("def f(x):\n    return 10 ** x + 1\n", [((5000,), 10**5000 + 1)])) == 1.0
    assert value(judge_code("def f(x):\n    return 10 ** x + 1\n", [((5000,), 10**5000)])) == 0.0


def test_a_box_that_cannot_be_had_is_invalid(judge_code: Any) -> None:
    class Shut:
        def __init__(self, boxes: Any) -> None:
            pass

        async def acquire(self, spec: Any, *, timeout_s: float = 30.0, **_: Any) -> Any:
            from lehr.sandbox.errors import SandboxError

            raise SandboxError("no box today")

        async def release(self, box: Any) -> None:
            pass

    reward = judge_code("def f(x):\n    return x * 2\n", DOUBLES, wrap=Shut)
    assert isinstance(reward, Invalid) and reward.reason == "sandbox"
