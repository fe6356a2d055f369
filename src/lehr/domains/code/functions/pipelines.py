"""Sentences and code for filter, map and reduce over numbers, words and dictionaries."""

from __future__ import annotations

import random
from dataclasses import dataclass

LETTERS = "aeiorstnlm"


@dataclass(frozen=True, slots=True)
class Sketch:
    """A function in words and as an expression. ``family`` names the kind of its argument.

    shape: which operations it is composed of, without constants. level: 0 for one operation, up to 2.
    """

    family: str
    argument: str
    wording: str
    expression: str
    shape: str
    level: int
    constants: tuple[int | str, ...] = ()


def sketch(rng: random.Random, level: int) -> Sketch:
    """Draw a function of ``level`` + 1 operations."""
    family = rng.choices(("numbers", "range", "words", "dict", "string"), (30, 12, 22, 16, 20))[0]
    if family == "string":
        return _string(rng, level)
    if family == "dict":
        return _dict(rng, level)
    return _sequence(rng, family, level)


_NUMBER_FILTERS = {
    "even": ("even", "x % 2 == 0"),
    "odd": ("odd", "x % 2 == 1"),
    "positive": ("positive", "x > 0"),
    "negative": ("negative", "x < 0"),
    "above": ("greater than {k}", "x > {k}"),
    "below": ("less than {k}", "x < {k}"),
    "multiple": ("divisible by {k}", "x % {k} == 0"),
}
_NUMBER_MAPS = {
    "double": ("doubled", "x * 2"),
    "square": ("squared", "x * x"),
    "negate": ("negated", "-x"),
    "add": ("plus {k}", "x + {k}"),
    "subtract": ("minus {k}", "x - {k}"),
    "times": ("times {k}", "x * {k}"),
    "abs": ("as an absolute value", "abs(x)"),
    "text": ("as a string", "str(x)"),
}
_WORD_FILTERS = {
    "longer": ("longer than {k} letters", "len(x) > {k}"),
    "shorter": ("shorter than {k} letters", "len(x) < {k}"),
    "starts": ("starting with '{c}'", "x.startswith('{c}')"),
    "ends": ("ending with '{c}'", "x.endswith('{c}')"),
    "contains": ("containing '{c}'", "'{c}' in x"),
}
_WORD_MAPS = {
    "upper": ("in upper case", "x.upper()"),
    "backwards": ("spelled backwards", "x[::-1]"),
    "initial": ("as its first letter", "x[0]"),
    "length": ("as its length", "len(x)"),
    "capital": ("capitalized", "x.capitalize()"),
}
_REDUCES = {
    "list": ("a list of {all}", "{items}"),
    "sorted": ("a sorted list of {all}", "sorted({items})"),
    "descending": ("a list of {all}, largest first", "sorted({items}, reverse=True)"),
    "reversed": ("a list of {all}, in reverse order", "{items}[::-1]"),
    "first": ("the first {n} of {all}", "{items}[:{n}]"),
    "last": ("the last {n} of {all}", "{items}[-{n}:]"),
    "sum": ("the sum of {all}", "sum({items})"),
    "count": ("the number of {all}", "len({items})"),
    "max": ("the largest of {all}, or 0 if there are none", "max({items}, default=0)"),
    "min": ("the smallest of {all}, or 0 if there are none", "min({items}, default=0)"),
    "join": ("{all}, joined with '{j}'", "'{j}'.join({items})"),
}
_FOR_NUMBERS = ("list", "sorted", "descending", "reversed", "first", "last", "sum", "count", "max", "min")
_FOR_WORDS = ("list", "sorted", "reversed", "first", "last", "count", "join")


_NOT_FOR_RANGE = ("positive", "negative", "abs")


def _sequence(rng: random.Random, family: str, level: int) -> Sketch:
    words = family == "words"
    filters, maps = (_WORD_FILTERS, _WORD_MAPS) if words else (_NUMBER_FILTERS, _NUMBER_MAPS)
    kinds = set(rng.sample(("filter", "map", "reduce"), level + 1))
    if kinds == {"reduce"} and family == "range":
        kinds = {"filter"}
    usable = [name for name in (*filters, *maps) if family != "range" or name not in _NOT_FOR_RANGE]
    chosen_filter = rng.choice([name for name in filters if name in usable]) if "filter" in kinds else ""
    chosen_map = rng.choice([name for name in maps if name in usable]) if "map" in kinds else ""
    choices = [name for name in (_FOR_WORDS if words else _FOR_NUMBERS) if name != "list"]
    if chosen_map in ("text", "length", "initial"):
        choices = [name for name in choices if name in ("reversed", "first", "last", "count", "sorted")]
    if chosen_map:
        choices = [name for name in choices if name != "count"]
    reduce = rng.choice(choices) if "reduce" in kinds else "list"
    k, n = rng.randint(2, 6), rng.randint(2, 4)
    c, j = rng.choice(LETTERS), rng.choice("-+/")
    source, place = {
        "numbers": ("xs", "in xs"),
        "range": ("range(1, n + 1)", "from 1 to n"),
        "words": ("s.split()", "of s"),
    }[family]
    noun = "words" if words else "numbers"
    phrase, test = filters[chosen_filter] if chosen_filter else ("", "")
    if phrase and " " not in phrase:
        every = f"the {phrase} {noun} {place}"
    else:
        every = f"the {noun} {place} {phrase}".rstrip()
    how, value = maps[chosen_map] if chosen_map else ("", "x")
    every += f", each {how}" if how else ""
    condition = f" if {test}" if test else ""
    items = f"[{value} for x in {source}{condition}]"
    if not chosen_filter and not chosen_map:
        items = source if family != "range" else f"list({source})"
    said, code = _REDUCES[reduce]
    given = {"k": k, "n": n, "c": c, "j": j}
    return Sketch(
        family,
        {"numbers": "xs", "range": "n", "words": "s"}[family],
        said.format(all=every.format(**given), **given),
        code.format(items=items.format(**given), **given),
        f"{family}/{chosen_filter}/{chosen_map}/{reduce}",
        level,
        (k, c),
    )


_VALUE_FILTERS = {
    "above": ("greater than {k}", "v > {k}"),
    "below": ("less than {k}", "v < {k}"),
    "even": ("that are even", "v % 2 == 0"),
    "negative": ("below zero", "v < 0"),
}
_VALUE_MAPS = {
    "double": ("doubled", "v * 2"),
    "add": ("plus {k}", "v + {k}"),
    "negate": ("negated", "-v"),
    "square": ("squared", "v * v"),
}
_DICT_REDUCES = {
    "keys": ("a list of the keys of d", "[k for k in d]", "[k for k, v in d.items() if {test}]"),
    "sorted_keys": ("a sorted list of the keys of d", "sorted(d)", "sorted(k for k, v in d.items() if {test})"),
    "sum": ("the sum of the values of d", "sum(d.values())", "sum(v for v in d.values() if {test})"),
    "count": ("the number of values of d", "len(d)", "len([v for v in d.values() if {test}])"),
    "values": ("a list of the values of d", "list(d.values())", "[v for v in d.values() if {test}]"),
}


def _dict(rng: random.Random, level: int) -> Sketch:
    test_name = rng.choice(list(_VALUE_FILTERS)) if level > 0 else ""
    said_test, test = _VALUE_FILTERS[test_name] if test_name else ("", "")
    k = rng.randint(2, 6)
    if level == 2 or (level == 0 and rng.random() < 0.4):
        name = rng.choice(list(_VALUE_MAPS))
        said, value = _VALUE_MAPS[name]
        wording = f"d with only the values {said_test}, each {said}" if test else f"d with every value {said}"
        code = f"{{a: {value} for a, v in d.items(){f' if {test}' if test else ''}}}"
        wording, code = wording.format(k=k), code.replace("{k}", str(k))
    else:
        name = rng.choice(list(_DICT_REDUCES))
        wording, plain, filtered = _DICT_REDUCES[name]
        if "keys" in name and test:
            wording += " whose values are " + said_test.removeprefix("that are ")
        elif test:
            wording += f" {said_test}"
        wording = wording.format(k=k)
        code = filtered.format(test=test.format(k=k)) if test else plain
    return Sketch("dict", "d", wording, code, f"dict/{test_name}/{name}", level, (k,))


_STRING_STEPS = {
    "reverse": ("reversed", "{s}[::-1]"),
    "upper": ("in upper case", "{s}.upper()"),
    "title": ("in title case", "{s}.title()"),
    "replace": ("with every '{c}' replaced by '{b}'", "{s}.replace('{c}', '{b}')"),
    "remove": ("without the letter '{c}'", "{s}.replace('{c}', '')"),
    "head": ("cut to its first {n} characters", "{s}[:{n}]"),
    "tail": ("cut to its last {n} characters", "{s}[-{n}:]"),
    "behead": ("without its first character", "{s}[1:]"),
    "repeat": ("repeated {n} times", "{s} * {n}"),
}
_STRING_ENDS = {
    "count": ("how often '{c}' occurs in s", "{s}.count('{c}')"),
    "length": ("the length of s", "len({s})"),
    "words": ("the number of words of s", "len({s}.split())"),
    "letters": ("a list of the characters of s", "list({s})"),
    "palindrome": ("whether s reads the same backwards", "{s} == {s}[::-1]"),
}


def _string(rng: random.Random, level: int) -> Sketch:
    c, b = rng.sample(LETTERS, 2)
    given = {"c": c, "b": b, "n": rng.randint(2, 4)}
    if level == 0 and rng.random() < 0.4:
        name = rng.choice(list(_STRING_ENDS))
        said, code = _STRING_ENDS[name]
        return Sketch(
            "string", "s", said.format(**given), code.format(s="s", **given), f"string/{name}", 0, (c,)
        )
    names = rng.sample(list(_STRING_STEPS), level + 1)
    expression = "s"
    for position, name in enumerate(names):
        expression = _STRING_STEPS[name][1].format(s=expression, **given)
        if name == "repeat" and position < level:
            expression = f"({expression})"
    said = ", then ".join(_STRING_STEPS[name][0].format(**given) for name in names)
    return Sketch("string", "s", f"s {said}", expression, "string/" + "/".join(names), level, (c,))
