"""Problems of ``reasoning-gym``, judged by ``match_answer`` instead of the package's own scorers.

The package's scorers pay for wrong answers in places (a default scorer that gives part credit for any text
containing the answer; tolerances wider than the answer; pay for any non-empty text), and some data sets
carry no answer at all. Only data sets in :data:`SOUND` are admitted: their answer is unique, and how to
read it is known. To admit another, check both and add it.

Options in ``domain.toml``: ``dataset``, and any option of that data set.
"""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from lehr.core.errors import ConfigError, MissingDependency, UnknownName
from lehr.core.task import Gold, Problem, Split
from lehr.domains.base import DomainCard
from lehr.domains.card import task_of
from lehr.domains.splitting import draw_for

SYSTEM = "Reply with the answer only."
SEEDS = 1 << 40
SOUND = {
    "chain_sum": "integer",
    "coin_flip": "decimal",
    "count_bits": "integer",
    "decimal_chain_sum": "decimal",
    "fraction_simplification": "fraction",
    "gcd": "integer",
    "lcm": "integer",
    "leg_counting": "integer",
    "letter_counting": "integer",
    "needle_haystack": "word",
    "number_filtering": "numbers",
    "number_sorting": "numbers",
    "simple_equations": "integer",
    "spell_backward": "word",
    "word_sequence_reversal": "list",
}
REFUSED = {
    "boxnet": "it carries no answer to compare with",
    "codeio": "its questions differ between two runs of the same seed",
    "game_of_life_halting": "its scorer pays for any non-empty text and its answer is not text",
    "graph_color": "it carries no answer to compare with",
    "polynomial_equations": "several answers are right",
    "propositional_logic": "it carries no answer to compare with",
    "rubiks_cube": "it carries no answer to compare with",
    "rush_hour": "it carries no answer to compare with",
}


class ReasoningSource:
    """Draws questions; a question belongs to one split, whatever seed it comes from."""

    def problem(self, card: DomainCard, split: Split, index: int) -> Problem:
        """Return one problem. Raises ``ConfigError`` for a data set that cannot be judged strictly."""
        options = dict(card.options)
        name = str(options.pop("dataset", ""))
        kind = kind_of(name)
        items = _dataset(name, tuple(sorted(options.items())))

        def draw(rng: random.Random) -> tuple[str, Mapping[str, Any]]:
            item = cast("Mapping[str, Any]", items[rng.randrange(SEEDS)])
            return str(item["question"]), item

        _, item = draw_for(card.id, split, index, draw)
        answer = str(item["answer"])
        task = task_of(card, split, index, system=SYSTEM, user=str(item["question"]).strip())
        return Problem(task, Gold((answer,), {"answer": answer, "kind": kind}))


def kind_of(name: str) -> str:
    """Return how answers of a data set are read, or raise with the reason why it is kept out."""
    if name in REFUSED:
        raise ConfigError(f"reasoning-gym data set {name!r} is kept out: {REFUSED[name]}")
    if name not in SOUND:
        raise UnknownName.among("reasoning-gym data set with a sound strict comparison", name, SOUND)
    return SOUND[name]


@cache
def _dataset(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    try:
        with warnings.catch_warnings():  # its dependencies warn about their own syntax when first compiled
            warnings.simplefilter("ignore", SyntaxWarning)
            reasoning_gym: Any = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise MissingDependency(
            "the package reasoning-gym is not installed", hint="`pip install reasoning-gym==0.1.25`"
        ) from error
    try:
        return reasoning_gym.create_dataset(name, seed=0, size=2 * SEEDS, **dict(options))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym does not accept the options of {name!r}: {error}") from error


SOURCE = ReasoningSource()
