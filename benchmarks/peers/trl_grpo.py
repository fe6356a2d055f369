"""Peer of ``train.grpo_step``: TRL's ``GRPOTrainer``, in its fastest settings on a CPU.

Runs in an environment of its own. Reads a job as one line of JSON from standard input, then takes one whole
step (sampling, reward, one optimiser step) for every further line, and prints one line of JSON for each::

    {"model": FOLDER, "prompts": [text, …], "group": 8, "new_tokens": 32, "dtype": "float32", "threads": 2}
    go

No gradient checkpointing, no reference model, logging and saving off: nothing that the step does not need. All
completions are sampled at once; forward and backward go over them in four parts, which took 45 s a step where
one part took 51 and 10 GB more (float32, two Zen 3 cores).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

PARTS = 4


def main() -> None:
    job = json.loads(sys.stdin.readline())
    os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    os.environ["HF_HUB_OFFLINE"] = "1"
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # progress bars and dictionaries that libraries print must not mix with answers

    import torch
    import transformers
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(job["threads"])
    count = len(job["prompts"]) * job["group"]
    tokens: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [float(sum(map(ord, text)) % 2) for text in completions]

    class OnCommand(TrainerCallback):
        def __init__(self) -> None:
            self.began = 0.0

        def on_step_begin(self, args, state, control, **_):
            if not sys.stdin.readline():
                os._exit(0)
            self.began = time.perf_counter(), time.process_time()

        def on_step_end(self, args, state, control, **_):
            seconds, cpu_s = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
            print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "tokens": tokens[-1]}), file=out)

    dtype = getattr(torch, job["dtype"])
    arguments = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=dtype == torch.bfloat16,
        per_device_train_batch_size=count // PARTS,
        gradient_accumulation_steps=PARTS,
        num_generations=job["group"],
        max_completion_length=job["new_tokens"],
        learning_rate=1e-6,
        temperature=1.0,
        beta=0.0,
        max_steps=1000,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, attn_implementation="sdpa"),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": job["prompts"]}),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[OnCommand()],
    )
    print(json.dumps({"ready": trl.__version__, "torch": torch.__version__}), file=out)
    trainer.train()


if __name__ == "__main__":
    main()
