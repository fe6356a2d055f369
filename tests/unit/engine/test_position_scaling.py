"""Positions beyond the trained length give what transformers gives, on every path of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lehr.core.errors import ConfigError
from lehr.core.trace import Sampling
from lehr.engine.base import RequestTooLarge
from lehr.engine.native.engine import NativeEngine
from lehr.engine.native.settings import NativeConfig
from lehr.model.checkpoint import load_decoder, save_model
from lehr.model.scaling import RopeScaling
from lehr.model.tiny import random_decoder, tiny_config

TRAINED = 64
YARN, DYNAMIC = RopeScaling(factor=4), RopeScaling(type="dynamic", factor=4)


@pytest.fixture(scope="module", params=["linear", "dynamic", "yarn"])
def scaled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder without scaling, and transformers' model with one."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models")
    plain = random_decoder(tiny_config(num_layers=3, max_positions=TRAINED), seed=1, std=0.25)
    save_model(plain, folder / "plain")
    scaling = RopeScaling(type=request.param, factor=4)
    save_model(load_decoder(folder / "plain", scaling=scaling), folder / "scaled")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "scaled")
    assert model.config.rope_parameters["rope_type"] == request.param
    return folder / "plain", (scaling, model)


@pytest.mark.parametrize("kernels", [True, False])
def test_a_setting_of_the_engine_replaces_the_models_scaling(scaled: Any, kernels: bool) -> None:
    folder, (scaling, model) = scaled
    config = NativeConfig(token_budget=48, cache_tokens=4096, rope_scaling=scaling, kernels=kernels)
    engine = NativeEngine(load_decoder(folder, scaling=scaling), config=config)
    assert engine.model_config.max_positions == 4 * TRAINED
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, 256, 200).tolist()
    hot = Sampling(max_tokens=20, seed=3)
    requests = [engine.submit(prompt[:n], hot) for n in (10, 70, 200)]
    while not engine.idle:
        engine.step()
    requests.append(engine.submit(requests[1].tokens, hot))  # another length: what is cached may not serve
    requests.append(engine.submit(prompt, hot))
    while not engine.idle:
        engine.step()
    assert requests[4].cached_tokens == 199
    for request in requests:
        with torch.no_grad():
            model(torch.tensor([[0]]))  # it keeps the angles of the longest sequence until a short one comes
            logits = model(torch.tensor([request.tokens[:-1]])).logits[0].double()
        wanted = torch.tensor(request.tokens[1:])[:, None]
        said = torch.log_softmax(logits, -1).gather(1, wanted)[:, 0].numpy()
        own = request.completion().raw_logprobs
        assert np.abs(said[request.prompt_length - 1 :] - own).max() < 1e-4
        assert np.abs(said - engine.score(request.tokens)).max() < 1e-4
    with pytest.raises(RequestTooLarge):
        engine.submit(prompt, Sampling(max_tokens=57))


def test_a_scaling_that_lacks_the_trained_length_is_refused() -> None:
    linear = tiny_config(max_positions=256).scaled(RopeScaling(type="linear", factor=2))
    assert linear.max_positions == 512
    with pytest.raises(ConfigError, match="original_max_position_embeddings"):
        linear.scaled(YARN)
    named = RopeScaling(factor=4, original_max_position_embeddings=256)
    assert linear.scaled(named).max_positions == 1024
    assert tiny_config(max_positions=256).scaled(YARN).scaled(DYNAMIC).max_positions == 1024


def test_a_length_that_changes_the_angles_cannot_be_trained_on() -> None:
    from lehr.train.gradient import score
    from lehr.train.packing import Microbatch, Span

    decoder = random_decoder(tiny_config(max_positions=16).scaled(DYNAMIC))
    for length, fits in ((16, True), (17, False)):
        empty = np.zeros(0, np.int64)
        batch = Microbatch(
            tokens=np.zeros(length, np.int64),
            positions=np.arange(length),
            spans=(Span(0, length),),
            rows=empty,
            samples=empty,
            targets=empty,
            temperatures=empty.astype(np.float32),
            sampled=empty.astype(np.float32),
            advantages=empty.astype(np.float32),
        )
        if fits:
            assert len(score(decoder, batch)) == 0
        else:
            with pytest.raises(ConfigError, match="dynamic"):
                score(decoder, batch)
