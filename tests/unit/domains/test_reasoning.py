from __future__ import annotations

import pytest

from lehr.core.config import resolve
from lehr.core.errors import ConfigError
from lehr.domains.base import DomainCard
from lehr.domains.reasoning.source import REFUSED, SOUND, SOURCE
from lehr.verify.verifiers.answer import KINDS


def card(**options: object) -> DomainCard:
    return resolve(
        DomainCard,
        {"id": "r", "title": "r", "generator": "x:y", "reward": ["match_answer"], "options": options},
    )


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_v27_data_sets_that_cannot_be_judged_are_kept_out_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match="kept out"):
        SOURCE.problem(card(dataset=name), "train", 0)


@pytest.mark.parametrize("name", sorted(SOUND))
def test_every_admitted_data_set_has_gold_that_reads(name: str) -> None:
    for index in range(5):
        gold = SOURCE.problem(card(dataset=name), "train", index).gold
        assert KINDS[gold.data["kind"]](gold.data["answer"]) is not None


def test_mistakes_in_options_are_named() -> None:
    with pytest.raises(LookupError, match="chain_sum"):
        SOURCE.problem(card(dataset="chain_sums"), "train", 0)
    with pytest.raises(ConfigError, match="max_term"):
        SOURCE.problem(card(dataset="chain_sum", max_term=3), "train", 0)
