"""Shared prompts, packing and splits change nothing in log-probabilities and gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lehr.train.gradient import accumulate, score
from lehr.train.head import head_loss, target_logprobs
from lehr.train.losses import PolicyTerms, PolicyTokens, policy_loss
from lehr.train.packing import pack
from lehr.train.trainer import policy_tokens

TERMS = PolicyTerms()
DPPO = policy_loss("dppo_tv")
GSPO = policy_loss("gspo")


def gradients(decoder, samples, budget=2048, *, share=True, count=None, loss=DPPO):
    """The gradient of a policy loss by our way, as one dictionary."""
    decoder.zero_grad()
    grads = {name: torch.zeros_like(p) for name, p in decoder.named_parameters()}
    for name, parameter in decoder.named_parameters():
        parameter.grad = grads[name]
    micro = pack(samples, budget, share=share)
    total = count or sum(len(m.rows) for m in micro)
    for part in micro:
        known = policy_tokens(part)
        accumulate(
            decoder,
            part,
            lambda lp, cut, known=known: loss.function(lp, known[cut], TERMS) / total,
            grads["embed.weight"],
            grads["embed.weight"],
            coupled=loss.coupled,
        )
    return {name: grad.clone() for name, grad in grads.items()}


def plain_gradients(decoder, samples, plain, loss=DPPO):
    """The same from the definition: each sample alone, through autograd."""
    decoder.zero_grad()
    total = sum(int(s.own.sum()) for s in samples)
    for sample in samples:
        own = torch.from_numpy(sample.own.copy())
        sampled, advantages = (torch.from_numpy(x)[own] for x in (sample.logprobs, sample.advantages))
        known = PolicyTokens(sampled, advantages, torch.zeros(len(sampled), dtype=torch.int64))
        (loss.function(plain(decoder, sample), known, TERMS).sum() / total).backward()
    return {name: p.grad.clone() for name, p in decoder.named_parameters()}


def assert_equal(one, other, tolerance=1e-5):
    scale = max(float(g.abs().max()) for g in other.values())
    for name in other:
        torch.testing.assert_close(one[name] / scale, other[name] / scale, atol=tolerance, rtol=0, msg=name)


def mixed(samples):
    return [
        *samples.group("g", 5, prompt=30),
        *samples.group("h", 3, prompt=12, temperature=0.6),
        samples.one(samples.tokens(8), 4, 6, advantage=-0.7),
    ]


def test_gradients_with_shared_prompts_equal_the_definition(decoder, samples, plain):
    batch = mixed(samples)
    assert_equal(gradients(decoder, batch), plain_gradients(decoder, batch, plain))


def test_sharing_changes_nothing(decoder, samples):
    batch = mixed(samples)
    assert_equal(gradients(decoder, batch), gradients(decoder, batch, share=False))


def test_long_samples_are_cut_without_a_trace(decoder, samples, plain):
    batch = [samples.one(samples.tokens(290), 250), *samples.group("g", 2, prompt=300)]
    assert_equal(gradients(decoder, batch), plain_gradients(decoder, batch, plain))


def on_policy(decoder, samples, plain):
    """Let the recorded log-probabilities be near those of the weights, so that sequences are and are not
    clipped."""
    noise = np.random.default_rng(5)
    for sample in samples:
        near = plain(decoder, sample).detach().numpy() + noise.normal(0, 1e-3, int(sample.own.sum()))
        sample.logprobs[sample.own] = near
    return samples


def test_a_loss_that_couples_tokens_has_the_gradient_of_its_definition(decoder, samples, plain):
    batch = on_policy(decoder, mixed(samples), plain)
    for budget in (2048, 64):
        assert_equal(gradients(decoder, batch, budget, loss=GSPO), plain_gradients(decoder, batch, plain, GSPO))


def test_a_coupled_loss_sees_all_tokens_also_when_the_head_works_in_chunks(
    decoder, samples, plain, monkeypatch
):
    batch = on_policy(decoder, mixed(samples), plain)
    whole = gradients(decoder, batch, loss=GSPO)
    monkeypatch.setattr("lehr.train.head.chunk_rows", lambda vocab_size: 7)
    assert_equal(gradients(decoder, batch, loss=GSPO), whole)


def scores(decoder, samples, budget=2048, *, share=True):
    found = [None] * len(samples)
    for part in pack(samples, budget, share=share):
        values = score(decoder, part)
        for index in np.unique(part.samples):
            found[index] = values[torch.from_numpy(part.samples == index)]
    return found


def test_r1_the_ratio_is_one_at_any_temperature(decoder, samples, plain):
    batch = [s for t in (0.6, 1.0, 1.7) for s in samples.group(f"at {t}", 4, temperature=t)]
    for sample, ours in zip(batch, scores(decoder, batch), strict=True):
        sampler = plain(decoder, sample).detach()
        assert ((ours - sampler).exp() - 1).abs().max() < 1e-4


def test_r7_log_probabilities_do_not_depend_on_packing(decoder, samples):
    batch = mixed(samples)
    alone = [scores(decoder, [sample])[0] for sample in batch]
    for budget, share in ((2048, True), (64, True), (2048, False)):
        for one, other in zip(scores(decoder, batch, budget, share=share), alone, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    backwards = scores(decoder, batch[::-1])[::-1]
    for one, other in zip(backwards, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_r14_the_gradient_does_not_change_with_the_split(decoder, samples):
    batch = mixed(samples)
    whole = gradients(decoder, batch)
    assert_equal(gradients(decoder, batch, 64), whole)
    total = sum(int(s.own.sum()) for s in batch)
    first, second = (gradients(decoder, part, count=total) for part in (batch[:4], batch[4:]))
    assert_equal({name: first[name] + second[name] for name in first}, whole)


def test_r20_tool_output_has_a_gradient_of_exactly_zero(decoder, samples):
    sample = samples.one(samples.tokens(10), 4, 3, between=6)
    (micro,) = pack([sample], 2048)
    assert micro.targets.tolist() == sample.tokens[sample.own].tolist()
    tool = np.flatnonzero(~sample.own)
    other = sample.advantages.copy()
    other[tool] = 1000.0
    loud = replace(sample, advantages=other, logprobs=np.where(sample.own, sample.logprobs, np.float32(-50)))
    one, same = gradients(decoder, [sample]), gradients(decoder, [loud])
    assert all(torch.equal(one[name], same[name]) for name in one)


class HeadRows(TorchDispatchMode):
    """Counts the rows that are projected onto the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.projected = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default and result.shape[1] == self.vocab_size:
            self.projected += result.shape[0]
        return result


def test_r21_logits_exist_for_loss_tokens_only(decoder, samples):
    for prompt in (100, 400):
        sample = samples.one(samples.tokens(prompt), 10)
        with HeadRows(decoder.config.vocab_size) as seen:
            gradients(decoder, [sample])
        assert seen.projected == 10


def test_the_head_in_chunks_equals_the_head_at_once(monkeypatch):
    source = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 16, generator=source, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(40, 16, generator=source, requires_grad=True)
    targets = torch.randint(0, 40, (50,), generator=source)
    temperatures = torch.rand(50, generator=source) + 0.5
    slopes = torch.randn(50, generator=source)
    chosen = torch.log_softmax(hidden @ weight.t() / temperatures[:, None], -1).gather(1, targets[:, None])[
        :, 0
    ]
    loss = (slopes * chosen).sum()
    loss.backward()
    monkeypatch.setattr("lehr.train.head.CHUNK_BYTES", 4 * 40 * 17)
    grad_weight = torch.zeros(40, 16)
    found = head_loss(
        hidden.detach(), weight.detach(), targets, temperatures, lambda lp, cut: slopes[cut] * lp, grad_weight
    )
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(found.logprobs_N, chosen.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.grad_hidden_ND, hidden.grad, atol=1e-5, rtol=0)
    torch.testing.assert_close(grad_weight, weight.grad, atol=1e-5, rtol=0)
    again = target_logprobs(hidden.detach(), weight.detach(), targets, temperatures)
    assert torch.equal(again, found.logprobs_N)
