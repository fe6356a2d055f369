"""Peer of ``train.sft_tokens_per_s`` and ``train.peak_memory``: TRL's ``SFTTrainer``, in its fastest settings.

Reads a job as one line of JSON from standard input, then takes one optimiser step for every further line, and
prints one line of JSON for each::

    {"model": FOLDER, "examples": [{"tokens": [id, …], "prompt": 40}, …], "precision": "mixed", "threads": 2}
    go

``mixed``: float32 weights and optimiser, bfloat16 products by autocast; ``bfloat16``: the weights and
optimiser too. No gradient checkpointing, the whole batch in one forward and backward, logging and saving off.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time


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
    examples = job["examples"]
    tokens = sum(len(e["tokens"]) for e in examples)

    class OnCommand(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if not sys.stdin.readline():
                os._exit(0)
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            self.began = time.perf_counter(), time.process_time()

        def on_step_end(self, args, state, control, **_):
            seconds, cpu_s = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
            with open("/proc/self/status") as file:
                peak = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
            print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "tokens": tokens, "peak": peak}), file=out)

    weights = torch.float32 if job["precision"] in ("mixed", "float32") else torch.bfloat16
    arguments = trl.SFTConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=job["precision"] != "float32",
        per_device_train_batch_size=len(examples),
        gradient_accumulation_steps=1,
        max_length=None,
        learning_rate=1e-6,
        max_steps=1000,
        gradient_checkpointing=False,
        completion_only_loss=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    masks = [[int(n >= e["prompt"]) for n in range(len(e["tokens"]))] for e in examples]
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=weights, attn_implementation="sdpa"),
        args=arguments,
        train_dataset=Dataset.from_dict(
            {"input_ids": [e["tokens"] for e in examples], "completion_mask": masks}
        ),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[OnCommand()],
    )
    print(json.dumps({"ready": trl.__version__, "torch": torch.__version__}), file=out)
    trainer.train()


if __name__ == "__main__":
    main()
