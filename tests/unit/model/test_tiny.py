"""The tiny model is small, reproducible and sane."""

import torch

from lehr.model.tiny import tiny_config, tiny_decoder


def test_equal_seeds_give_equal_weights():
    one, same, other = (tiny_decoder(seed=s).to_hf() for s in (3, 3, 4))
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert not all(torch.equal(one[k], other[k]) for k in one)


def test_it_is_tiny_and_covers_every_byte():
    decoder = tiny_decoder()
    assert sum(p.numel() for p in decoder.parameters()) < 300_000
    assert tiny_config().vocab_size == 264
