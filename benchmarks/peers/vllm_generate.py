"""Peer of ``engine.decode``: vLLM's offline generation, warm, as it comes (continuous batching, prefix cache).

Runs in vLLM's own environment, which ``make test-vllm`` makes. The same exchange of lines as
``transformers_generate.py``. The prompts are those of the rounds before, so that its cache has them.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM writes its log to standard output
    job = json.loads(sys.stdin.readline())
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import vllm

    engine = vllm.LLM(
        job["model"], dtype=job["dtype"], max_model_len=2048, max_num_seqs=max(8, len(job["prompts"])),
        skip_tokenizer_init=True, seed=0,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]

    def run(count: int) -> tuple[float, int]:
        sampling = vllm.SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        done = engine.generate(prompts, sampling, use_tqdm=False)
        spent = time.perf_counter() - start
        return spent, sum(len(out.outputs[0].token_ids) for out in done)

    run(job["new_tokens"])
    print(json.dumps({"ready": vllm.__version__}), file=answers)
    for _ in sys.stdin:
        seconds, tokens = run(job["new_tokens"])
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers)


if __name__ == "__main__":
    main()
