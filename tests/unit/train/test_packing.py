"""The layout of micro-batches."""

from dataclasses import replace

import numpy as np
import pytest

from lehr.core.errors import ConfigError
from lehr.train.packing import common_prefix, pack


def test_a_shared_prompt_is_laid_out_once(samples):
    group = samples.group("g", 4, prompt=20, longest=6)
    (micro,) = pack(group, 2048)
    rests = sum(len(s.tokens) - 20 - 1 for s in group)
    assert len(micro.tokens) == 20 + rests
    assert micro.positions[:20].tolist() == list(range(20))
    for span in micro.spans[1:]:
        assert span.context == (0, 20)
        assert micro.positions[span.start : span.stop].tolist() == list(range(20, 20 + len(span)))


def test_every_loss_token_is_predicted_by_the_token_before_it(samples):
    group = samples.group("g", 3) + samples.group("h", 2) + [samples.one(samples.tokens(9), 4, 3)]
    for micro in pack(group, 64):
        for row, sample, target in zip(micro.rows, micro.samples, micro.targets, strict=True):
            tokens, position = group[sample].tokens, int(micro.positions[row])
            assert tokens[position] == micro.tokens[row]
            assert tokens[position + 1] == target
            assert group[sample].own[position + 1]


def test_the_common_part_ends_before_the_first_own_token(samples):
    prompt = samples.tokens(30)
    same = samples.one(prompt, 10)
    assert common_prefix([same, same]) == 30
    shorter = replace(same, own=np.arange(40) >= 12)
    assert common_prefix([same, shorter]) == 12


def test_members_that_differ_early_share_only_what_is_equal(samples):
    system = samples.tokens(16)
    chats = [samples.one([*system, *samples.tokens(10)], 5, prefix="domain") for _ in range(3)]
    (micro,) = pack(chats, 2048)
    assert len(micro.spans[0]) == 16
    assert len(micro.tokens) == 16 + 3 * (10 + 4)


def test_what_no_loss_token_depends_on_is_not_computed(samples):
    sample = samples.one(samples.tokens(20), 5)
    trailing = replace(
        sample,
        tokens=np.append(sample.tokens, np.arange(50, dtype=np.int32)),
        own=np.append(sample.own, np.zeros(50, bool)),
        logprobs=np.append(sample.logprobs, np.zeros(50, np.float32)),
        advantages=np.append(sample.advantages, np.zeros(50, np.float32)),
    )
    (micro,) = pack([trailing], 2048)
    assert len(micro.tokens) == 24


def test_micro_batches_respect_the_budget_and_hold_everything_once(samples):
    group = [s for g in range(5) for s in samples.group(str(g), 6, prompt=25, longest=30)]
    packed = pack(group, 128)
    assert len(packed) > 3
    assert all(len(m.tokens) <= 128 for m in packed)
    counts = np.bincount(np.concatenate([m.samples for m in packed]), minlength=len(group))
    assert counts.tolist() == [int(s.own.sum()) for s in group]


def test_a_sample_over_the_budget_has_a_micro_batch_to_itself(samples):
    long = samples.one(samples.tokens(300), 10)
    packed = pack([*samples.group("g", 3), long], 128)
    assert max(len(m.tokens) for m in packed) == 309


def test_samples_without_own_tokens_vanish(samples):
    assert pack([samples.one(samples.tokens(10))], 128) == []
    assert pack([], 128) == []


def test_a_first_token_marked_own_is_refused(samples):
    sample = samples.one(samples.tokens(4), 2)
    with pytest.raises(ConfigError, match="first token"):
        pack([replace(sample, own=np.ones(6, bool))], 128)


def test_arrays_of_unequal_length_are_refused(samples):
    sample = samples.one(samples.tokens(4), 2)
    with pytest.raises(ConfigError, match="lengths"):
        pack([replace(sample, logprobs=np.zeros(5, np.float32))], 128)


def test_samples_of_one_pair_share_a_micro_batch_whatever_their_prefixes_and_order(samples):
    batch = [
        replace(sample, prefix=f"{number % 3}", pair=f"p{number % 4}")
        for number, sample in enumerate(samples.group("g", 8, prompt=30) + samples.group("h", 8, prompt=25))
    ]
    micro = pack(batch, 64)
    where = {index: number for number, part in enumerate(micro) for index in set(part.samples.tolist())}
    assert len(micro) > 1 and len(where) == len(batch)
    for key in {s.pair for s in batch}:
        assert len({where[i] for i, s in enumerate(batch) if s.pair == key}) == 1


def test_what_some_samples_carry_all_must(samples):
    one, other = samples.group("g", 2)
    reference = np.arange(len(one.tokens), dtype=np.float32)
    (micro,) = pack([replace(one, reference=reference)], 2048)
    assert micro.reference is not None and micro.reference.tolist() == reference[one.own].tolist()
    assert micro.proximal is None
    with pytest.raises(ConfigError, match="1 of 2 samples lack reference"):
        pack([replace(one, reference=reference), other], 2048)
