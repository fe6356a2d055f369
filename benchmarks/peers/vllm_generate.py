"""Peer of ``engine.decode``: vLLM's offline generation on a CPU, compiled and warm.

Runs in vLLM's own environment, which ``make test-vllm`` makes. The same exchange of lines as
``transformers_generate.py``. Where its settings are not its defaults:

- The engine runs in this process and on every core. By default it runs in two more, and leaves a core to the
  one that schedules: half of a machine that has two.
- The limits are the same for every batch, so that what is compiled at the first start serves all that follow.
  It compiles with one thread, for minutes; vLLM keeps the result in ``~/.cache/vllm``.
- The prefix cache is emptied between rounds. The other sides compute every prompt in every round, too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

LENGTH, RUNNING, KV_BYTES = 2048, 64, 1 << 30
GOMP = "torch/lib/libgomp.so.1"
"""vLLM asks for the OpenMP that torch comes with to be loaded first, and does it for its own processes only."""


def main() -> None:
    if "LD_PRELOAD" not in os.environ:
        here = Path(sys.prefix, "lib", "python{}.{}".format(*sys.version_info), "site-packages", GOMP)
        if not here.exists():
            sys.exit(f"error: no {here}; expected the environment that tools/setup-vllm.sh makes")
        os.environ["LD_PRELOAD"] = str(here)
        os.execv(sys.executable, [sys.executable, *sys.argv])  # before anything is read
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM writes its log to standard output
    job = json.loads(sys.stdin.readline())
    os.environ |= {
        "OMP_NUM_THREADS": str(job["threads"]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    engine = vllm.LLM(
        job["model"], dtype=job["dtype"], max_model_len=LENGTH, max_num_seqs=max(RUNNING, len(job["prompts"])),
        kv_cache_memory_bytes=KV_BYTES, skip_tokenizer_init=True, seed=0,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    sampling = vllm.SamplingParams(
        temperature=1.0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False
    )

    def run() -> tuple[float, int]:
        if not engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not emptied")
        start = time.perf_counter()
        done = engine.generate(prompts, sampling, use_tqdm=False)
        spent = time.perf_counter() - start
        return spent, sum(len(out.outputs[0].token_ids) for out in done)

    run()
    print(json.dumps({"ready": vllm.__version__}), file=answers)
    for _ in sys.stdin:
        seconds, tokens = run()
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers)


if __name__ == "__main__":
    main()
