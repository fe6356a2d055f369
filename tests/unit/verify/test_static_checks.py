from __future__ import annotations

from typing import Any

import pytest

GOLD = {"entry": "f", "arity": 1}


def value(judge_plain: Any, source: str) -> float:
    return judge_plain("run_static_checks", "", GOLD, files={"solution.py": source.encode()}).value


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("def f(x):\n    return x\n", 1.0),
        ("import math\nK = 3\ndef f(x):\n    'doc'\n    return math.gcd(x, K)\n", 1.0),
        ("import os\ndef f(x):\n    return os.getpid()\n", 0.75),
        ("from . import y\ndef f(x):\n    return x\n", 0.75),
        ("def f(x):\n    return eval(x)\n", 0.75),
        ("def f(x):\n    return x.__class__\n", 0.75),
        ("print(1)\ndef f(x):\n    return x\n", 0.75),
        ("def g(x):\n    return x\n", 0.0),
        ("def f(x, y):\n    return x\n", 0.0),
        ("def f(x:\n", 0.0),
        ("", 0.0),
        ("def f(x):\n    return 1\n#" + "x" * 20_000, 0.0),
        ("def f(x):\n    return " + "(" * 3000 + "x" + ")" * 3000 + "\n", 0.0),
        ("def f(x):\n    return " + "-" * 9000 + "x\n", 0.0),
        ("def f(x):\n    return '\\d'\n", 1.0),
    ],
)
def test_each_check(judge_plain: Any, source: str, want: float) -> None:
    assert value(judge_plain, source) == want
