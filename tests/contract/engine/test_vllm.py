"""A real vLLM server on a real model, with the options that change how it computes but not what.

Takes part where ``LEHR_VLLM_PYTHON`` names the interpreter of vLLM's environment (``make test-vllm``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lehr.core.errors import LehrError, MissingDependency, RoleLost
from lehr.core.trace import Completion, Sampling, Version
from lehr.engine.base import EngineError
from lehr.engine.local import open_engine
from lehr.engine.native.settings import NativeConfig
from lehr.engine.served.http import Server
from lehr.engine.vllm.launch import open_vllm
from lehr.engine.vllm.settings import SpeculativeConfig, VllmConfig
from lehr.model.fetch import locate
from lehr.model.tokenizer import load_tokenizer

VLLM = os.environ.get("LEHR_VLLM_PYTHON", "")
ABSENT = "other host: vLLM lives in an environment of its own, see make test-vllm"
needs_vllm = pytest.mark.skipif(not VLLM, reason=ABSENT)
TEXT = "one two three four five six seven eight nine ten, " * 2 + "one two"
CONFIG = VllmConfig(
    python=Path(VLLM).absolute(),
    dtype="float32",
    length=512,
    max_running=4,
    cache_gib=0.5,
    block_tokens=32,
    token_budget=48,
    chunked_prefill=True,
    speculative=SpeculativeConfig(method="ngram", tokens=3, longest_match=3, shortest_match=2),
    eager=True,
)


@needs_vllm
@pytest.mark.timeout(500)
def test_vllm_e7_e8_chunks_and_drafts_give_the_native_engines_values(run: Any, tmp_path: Path) -> None:
    folder = locate("smollm2-135m")
    prompt = load_tokenizer(folder).encode(TEXT)
    greedy = Sampling(temperature=0, max_tokens=24)

    async def native() -> Completion:
        engine = open_engine(folder, NativeConfig(dtype="float32"))
        try:
            return await engine.generate(prompt, greedy)
        finally:
            await engine.close()

    async def served() -> None:
        engine = await open_vllm(folder, CONFIG, Version(1, 0), tmp_path / "log")
        try:
            done = await engine.generate(prompt, greedy)
            stats = await engine.stats()
            assert stats.drafted_tokens > 0 and stats.accepted_tokens > 0
            assert done.tokens.tolist() == expected.tokens.tolist()
            assert np.abs(done.raw_logprobs - expected.raw_logprobs).max() < 1e-3
            warm = await engine.generate(prompt, Sampling(temperature=0.7, max_tokens=24, seed=3))
            text = [*prompt, *warm.tokens.tolist()]
            assert np.abs((await engine.score(text))[: len(prompt) - 1]).max() > 0
            stopped = await engine.generate(prompt, Sampling(temperature=0, max_tokens=24, stop=("five",)))
            said = load_tokenizer(folder).decode(stopped.tokens.tolist())
            assert stopped.stop == "stop" and said.endswith("five")
            guest = Server("vLLM", engine._process.url, "another token")
            for path in ("/pause", "/collective_rpc", "/inference/v1/generate", "/reset_prefix_cache"):
                with pytest.raises(EngineError, match="refused the token"):
                    await guest.post(path)
            with pytest.raises(EngineError, match="refused the token"):
                await guest.get("/metrics")
            await guest.close()
        finally:
            await engine.close()
        with pytest.raises(RoleLost):
            await Server("vLLM", engine._process.url).get("/health", timeout_s=5)

    expected = run(native())
    run(served(), 450)


@needs_vllm
@pytest.mark.timeout(500)
def test_vllm_that_does_not_start_says_why(run: Any, folder: Path, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"block_tokens": 7, "speculative": None})
    with pytest.raises(RoleLost, match=r"vLLM ended with 1; its log .*\n(.*\n)*.*rror"):
        run(open_vllm(folder, config, Version(1, 0), tmp_path / "log"), 450)


def test_an_environment_that_is_not_there_names_the_command_that_makes_it(run: Any, folder: Path) -> None:
    with pytest.raises(MissingDependency, match="make test-vllm") as caught:
        run(open_vllm(folder, VllmConfig(python=Path("/nowhere/python"))))
    assert isinstance(caught.value, LehrError)
