"""Whether two models mean the same by a token id."""

from __future__ import annotations

from pathlib import Path

from lehr.core.errors import ConfigError
from lehr.model.tokenizer import load_tokenizer


def require_same_vocabulary(student: Path, teacher: Path) -> None:
    """Raise :class:`ConfigError` that names both models and the first id on which they differ, where they
    do.
    """
    mine, theirs = load_tokenizer(student).vocabulary(), load_tokenizer(teacher).vocabulary()
    if mine == theirs:
        return
    ours, others = {i: t for t, i in mine.items()}, {i: t for t, i in theirs.items()}
    first = min(i for i in ours.keys() | others.keys() if ours.get(i) != others.get(i))
    raise ConfigError(
        f"the vocabularies of {student} ({len(mine)} tokens) and of its teacher {teacher} ({len(theirs)}) "
        f"differ: id {first} is {ours.get(first)!r} and {others.get(first)!r}",
        expected="a teacher with the same tokenizer, whose log-probabilities are of the same tokens",
        hint="Take a larger model of the same family, or method='off_policy', which imitates its text.",
    )
