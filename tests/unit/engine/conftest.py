"""A tiny model with spread-out logits, engines on it, and transformers as the reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lehr.core.trace import Sampling, Version
from lehr.engine.native.engine import NativeConfig, NativeEngine
from lehr.engine.native.kernels.build import why_not
from lehr.engine.native.kernels.load import kernels_for
from lehr.engine.native.request import Request
from lehr.engine.native.weights import prepared
from lehr.model.checkpoint import save_model
from lehr.model.decoder import Decoder
from lehr.model.tiny import random_decoder, tiny_config
from lehr.model.tokenizer import ByteTokenizer

Prompt = list[int]


class Bench:
    """Makes engines and prompts, and says what a full float32 forward of transformers says."""

    def __init__(self, folder: Path, *, kernels: bool) -> None:
        self._folder = folder
        self._settings = {"token_budget": 64, "max_running": 8, "cache_tokens": 4096, "kernels": kernels}
        self._peers: dict[int, Any] = {}

    def decoder(self, seed: int = 1) -> Decoder:
        return random_decoder(tiny_config(num_layers=3), seed=seed, std=0.25)

    def engine(self, seed: int = 1, *, stop_ids: tuple[int, ...] = (), **settings: Any) -> NativeEngine:
        config = NativeConfig(**(self._settings | settings))
        return NativeEngine(self.decoder(seed), config=config, tokenizer=ByteTokenizer(), stop_ids=stop_ids)

    def run(
        self, engine: NativeEngine, *requests: Request, after_step: Callable[[int], None] = lambda _: None
    ) -> None:
        """Step until all is done."""
        number = 0
        while not engine.idle:
            engine.step()
            number += 1
            after_step(number)
            if number > 5000:
                raise RuntimeError("the engine does not come to an end")
        assert all(r.finished for r in requests)

    def swap(self, engine: NativeEngine, seed: int, n: int = 1, in_flight: Any = "keep") -> list[Request]:
        kernels = kernels_for(engine.dtype) if engine.config.kernels else None
        engine.offer(Version(0, n), prepared(self.decoder(seed), engine.config.weights, kernels))
        return engine.activate(Version(0, n), in_flight)

    def prompt(self, length: int, seed: int = 0) -> Prompt:
        draw = random.Random(f"{length}/{seed}")
        return [draw.randrange(256) for _ in range(length)]

    def reference(self, tokens: list[int], temperature: float = 1.0, seed: int = 1) -> np.ndarray:
        """Return the log-probability of every token after the first."""
        peer = self.peer(seed)
        with torch.no_grad():
            logits = peer(torch.tensor([tokens[:-1]])).logits[0].double() / temperature
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()

    def peer(self, seed: int = 1) -> Any:
        if seed not in self._peers:
            transformers = pytest.importorskip("transformers")
            save_model(self.decoder(seed), self._folder / str(seed))
            self._peers[seed] = transformers.AutoModelForCausalLM.from_pretrained(self._folder / str(seed))
        return self._peers[seed]

    def agrees(self, request: Request, seed: int = 1) -> bool:
        """Whether every recorded raw log-probability is the reference's, to 1e-4."""
        completion = request.completion()
        said = self.reference(request.tokens, request.sampling.temperature or 1.0, seed)
        difference = np.abs(said[request.prompt_length - 1 :] - completion.raw_logprobs)
        return len(difference) == request.own and float(difference.max()) < 1e-4


@pytest.fixture(scope="session", params=["kernels", "plain"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    if request.param == "kernels" and why_not():
        pytest.skip(why_not())
    return Bench(tmp_path_factory.mktemp("models"), kernels=request.param == "kernels")


@pytest.fixture
def greedy() -> Sampling:
    return Sampling(temperature=0, max_tokens=24)
