"""Sentences and code for filter, map and reduce over numbers, words and strings."""

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
    family = rng.choices(("numbers", "words", "string"), (45, 25, 30))[0]
    return _string(rng, level) if family == "string" else _sequence(rng, family, level)


_NUMBER_FILTERS = {
    "even": ("even", "x % 2 == 0"),
    "odd": ("odd", "x % 2 == 1"),
    "positive": ("positive", "x > 0"),
    "above": ("greater than {k}", "x > {k}"),
    "below": ("less than {k}", "x < {k}"),
    "multiple": ("divisible by {k}", "x % {k} == 0"),
}
_NUMBER_MAPS = {
    "double": ("doubled", "x * 2"),
    "square": ("squared", "x * x"),
    "negate": ("negated", "-x"),
    "add": ("plus {k}", "x + {k}"),
    "text": ("as a string", "str(x)"),
}
_WORD_FILTERS = {
    "longer": ("longer than {k} letters", "len(x) > {k}"),
    "starts": ("starting with '{c}'", "x.startswith('{c}')"),
    "ends": ("ending with '{c}'", "x.endswith('{c}')"),
    "contains": ("containing '{c}'", "'{c}' in x"),
}
_WORD_MAPS = {
    "upper": ("in upper case", "x.upper()"),
    "backwards": ("spelled backwards", "x[::-1]"),
    "length": ("as its length", "len(x)"),
}
_REDUCES = {
    "list": ("a list of {all}", "{items}"),
    "sorted": ("a sorted list of {all}", "sorted({items})"),
    "reversed": ("a list of {all}, in reverse order", "{items}[::-1]"),
    "first": ("the first {n} of {all}", "{items}[:{n}]"),
    "last": ("the last {n} of {all}", "{items}[-{n}:]"),
    "sum": ("the sum of {all}", "sum({items})"),
    "count": ("the number of {all}", "len({items})"),
    "max": ("the largest of {all}, or 0 if there are none", "max({items}, default=0)"),
    "join": ("{all}, joined with '{j}'", "'{j}'.join({items})"),
}
_FOR_NUMBERS = ("list", "sorted", "reversed", "first", "last", "sum", "count", "max")
_FOR_WORDS = ("list", "sorted", "reversed", "first", "last", "count", "join")


def _sequence(rng: random.Random, family: str, level: int) -> Sketch:
    words = family == "words"
    filters, maps = (_WORD_FILTERS, _WORD_MAPS) if words else (_NUMBER_FILTERS, _NUMBER_MAPS)
    kinds = set(rng.sample(("filter", "map", "reduce"), level + 1))
    chosen_filter = rng.choice(list(filters)) if "filter" in kinds else ""
    chosen_map = rng.choice(list(maps)) if "map" in kinds else ""
    choices = [name for name in (_FOR_WORDS if words else _FOR_NUMBERS) if name != "list"]
    if chosen_map in ("text", "length"):
        choices = [name for name in choices if name in ("reversed", "first", "last", "count", "sorted")]
    if chosen_map:
        choices = [name for name in choices if name != "count"]
    reduce = rng.choice(choices) if "reduce" in kinds else "list"
    k, n = rng.randint(2, 6), rng.randint(2, 4)
    c, j = rng.choice(LETTERS), rng.choice("-+/")
    source, place = ("s.split()", "of s") if words else ("xs", "in xs")
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
        items = source
    said, code = _REDUCES[reduce]
    given = {"k": k, "n": n, "c": c, "j": j}
    return Sketch(
        family,
        "s" if words else "xs",
        said.format(all=every.format(**given), **given),
        code.format(items=items.format(**given), **given),
        f"{family}/{chosen_filter}/{chosen_map}/{reduce}",
        level,
        (k, c),
    )


_STRING_STEPS = {
    "reverse": ("reversed", "{s}[::-1]"),
    "upper": ("in upper case", "{s}.upper()"),
    "replace": ("with every '{c}' replaced by '{b}'", "{s}.replace('{c}', '{b}')"),
    "remove": ("without the letter '{c}'", "{s}.replace('{c}', '')"),
    "head": ("cut to its first {n} characters", "{s}[:{n}]"),
    "tail": ("cut to its last {n} characters", "{s}[-{n}:]"),
    "repeat": ("repeated {n} times", "{s} * {n}"),
}
_STRING_ENDS = {
    "count": ("how often '{c}' occurs in s", "{s}.count('{c}')"),
    "length": ("the length of s", "len({s})"),
    "words": ("the number of words of s", "len({s}.split())"),
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
