"""Peer of ``engine.decode``: plain ``transformers`` generation of one batch, left-padded.

Needs torch and transformers only. Reads a job as one line of JSON from standard input, then does one
measured run for every further line, and prints one line of JSON for each::

    {"model": FOLDER, "prompts": [[id, …], …], "new_tokens": 48, "dtype": "float32", "threads": 2}
    go
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    job = json.loads(sys.stdin.readline())
    os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"]), attn_implementation="sdpa"
    ).eval()
    longest = max(map(len, job["prompts"]))
    pad = model.config.pad_token_id if model.config.pad_token_id is not None else 0
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in job["prompts"]])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in job["prompts"]])
    new = job["new_tokens"]

    def run(count: int) -> tuple[float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=count, min_new_tokens=count, pad_token_id=pad,
            )  # fmt: skip
        if out.shape[1] != longest + count:
            raise RuntimeError(f"generated {out.shape[1] - longest} tokens instead of {count}")
        return time.perf_counter() - start, time.process_time() - cpu

    run(2)
    print(json.dumps({"ready": transformers.__version__, "torch": torch.__version__}), flush=True)
    for _ in sys.stdin:
        seconds, cpu_s = run(new)
        tokens = new * len(job["prompts"])
        print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
