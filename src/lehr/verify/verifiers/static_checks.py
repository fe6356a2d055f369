"""``run_static_checks``: reads the candidate's code without running it.

``gold.data`` holds ``entry`` and, if wished, ``arity``. The text is parsed only, never compiled or run, and
is bounded in size beforehand, so that it costs no box.
"""

from __future__ import annotations

import ast
import warnings

from lehr.core.episode import Evidence
from lehr.core.task import Gold, Task
from lehr.sandbox.base import Boxes
from lehr.verify.base import NoScore, Score
from lehr.verify.verifiers.unit_tests import SOLUTION

SOURCE_BYTES = 16 << 10
MODULES = frozenset(
    (
        "bisect", "collections", "decimal", "fractions", "functools", "heapq", "itertools", "math", "operator",
        "re", "statistics", "string",
    )
)  # fmt: skip
NAMES = frozenset(
    (
        "__builtins__", "__import__", "breakpoint", "compile", "delattr", "dir", "eval", "exec", "exit",
        "getattr", "globals", "input", "locals", "open", "quit", "setattr", "vars",
    )
)  # fmt: skip


async def run_static_checks(task: Task, evidence: Evidence, gold: Gold, boxes: Boxes) -> Score | NoScore:
    """Return the fraction of checks met: the function is there as asked, nothing else runs at import, only
    pure modules are imported, no name that reaches outside the function. Unreadable code scores 0.
    """
    del boxes
    entry = gold.data.get("entry")
    if not isinstance(entry, str):
        return NoScore("verifier_crash", f"{task.id} names no function")
    tree = _parse(evidence.files.get(SOLUTION, b""))
    if tree is None or not tree.body:
        return Score(0.0, "the code does not parse")
    checks = {
        "defines the function": _defines(tree, entry, gold.data.get("arity")),
        "only definitions at the top level": all(_is_definition(node) for node in tree.body),
        "imports only pure modules": all(_is_pure(node) for node in ast.walk(tree)),
        "reaches nothing outside": not any(_reaches_out(node) for node in ast.walk(tree)),
    }
    if not checks["defines the function"]:
        return Score(0.0, f"no function {entry} as asked")
    missed = [name for name, met in checks.items() if not met]
    return Score(1 - len(missed) / len(checks), f"not met: {', '.join(missed)}" if missed else "all met")


def _parse(data: bytes) -> ast.Module | None:
    if len(data) > SOURCE_BYTES:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(data.decode())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _defines(tree: ast.Module, entry: str, arity: object) -> bool:
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry]
    if len(found) != 1:
        return False
    arguments = found[0].args
    return arity is None or len(arguments.posonlyargs) + len(arguments.args) == arity


def _is_definition(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return not any(isinstance(part, ast.Call) for part in ast.walk(node.value))
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text or isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom)


def _is_pure(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return all(alias.name.partition(".")[0] in MODULES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and (node.module or "").partition(".")[0] in MODULES
    return True


def _reaches_out(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in NAMES
    return isinstance(node, ast.Attribute) and node.attr.startswith("__")
