"""A model that says what it was built to say, and a server process on it.

Its next token depends on the last one only. A chat begins with characters of two, three and four bytes, one
byte to a token, and ends with a tool call in five tokens.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from openai import OpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lehr.model.checkpoint import save_model
from lehr.model.decoder import Decoder
from lehr.model.tiny import random_decoder, tiny_config
from lehr.model.tokenizer import HfTokenizer

TOKEN = "a-token-of-the-tests"
NAME = "scripted"
SAID = "é€😀ab"
CALL = ["<tool", "_call>", '{"name": "add", "arguments": ', '{"a": 1}}', "</tool_call>"]
FORK, LEFT, RIGHT, LOOP = "<fork>", "<left>", "<right>", "<loop>"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@dataclass
class Script:
    """The folder of the model, and its tokens by text."""

    folder: Path
    ids: dict[str, int]


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    folder = tmp_path_factory.mktemp("model") / NAME
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    fast.add_tokens([AddedToken(text, special=False) for text in (*CALL, FORK, LEFT, RIGHT, LOOP)])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    tokenizer = HfTokenizer(folder)
    ids = {text: fast.token_to_id(text) for text in (*CALL, *SPECIALS, FORK, LEFT, RIGHT, LOOP)}
    ids["\n"] = tokenizer.encode("\n")[0]
    spoken = [ids["\n"], *tokenizer.encode(SAID), *(ids[text] for text in CALL), ids["<|im_end|>"]]
    assert len(set(spoken)) == len(spoken), "a token that comes twice would have two successors"
    after = dict(zip(spoken, ([i] for i in spoken[1:]), strict=False))
    after |= {ids[FORK]: [ids[LEFT], ids[RIGHT]], ids[LEFT]: [ids[FORK]], ids[RIGHT]: [ids[FORK]]}
    after |= {ids[LOOP]: [ids[LOOP]]}
    save_model(_chain(after, tokenizer.vocab_size, ids["<|im_end|>"]), folder, tokenizer)
    return Script(folder, ids)


def _chain(after: dict[int, list[int]], vocab_size: int, end: int) -> Decoder:
    size = -(-vocab_size // 16) * 16
    config = tiny_config(vocab_size=vocab_size, num_layers=1, hidden_size=size, max_positions=1 << 15)
    config = config.model_copy(update={"tied_head": False})
    tensors = dict(random_decoder(config, std=0).to_hf())
    tensors["model.embed_tokens.weight"] = torch.eye(vocab_size, size)
    head = torch.zeros(vocab_size, size)
    for token in range(vocab_size):
        for successor in after.get(token, [end]):
            head[successor, token] = 4.0
    tensors["lm_head.weight"] = head
    return Decoder.from_hf(config, tensors, torch.float32)


@dataclass
class Running:
    """A server process."""

    process: subprocess.Popen[str]
    address: str
    token: str
    first_line: str
    said: list[str] = field(default_factory=list)

    def client(self, **more: object) -> OpenAI:
        options = {"api_key": self.token, "max_retries": 0, "timeout": 60} | more
        return OpenAI(base_url=f"{self.address}/v1", **options)  # type: ignore[arg-type]

    def metric(self, name: str) -> float:
        request = urllib.request.Request(
            f"{self.address}/metrics", headers={"Authorization": f"Bearer {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
        found = re.search(rf"^lehr_serve_{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, f"no {name} in {text}"
        return float(found[1])

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


Start = Callable[..., Running]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start servers; whatever is left at the end is killed."""
    home = tmp_path_factory.mktemp("home")
    started: list[Running] = []

    def begin(model: str | Path, *options: str, token: str | None = TOKEN) -> Running:
        variables = os.environ | {"LEHR_HOME": str(home)}
        variables.pop("LEHR_TOKEN", None)
        if token:
            variables["LEHR_TOKEN"] = token
        command = [sys.executable, "-m", "lehr", "serve", str(model), "--port", "0", *options]
        with (home / f"log-{len(started)}").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=variables)
        assert process.stdout is not None
        line = process.stdout.readline()
        if "--json" in options:
            known = json.loads(line)
        else:
            known = {"address": re.findall(r"http://[\d.:]+", line)[0], "token": token}
        running = Running(process, known["address"], known["token"], line)
        started.append(running)
        return running

    yield begin
    for running in started:
        running.process.kill()
        running.process.wait()
        if running.process.stdout:
            running.process.stdout.close()


@pytest.fixture(scope="session")
def server(start: Start, script: Script) -> Running:
    return start(script.folder, "--json", "--drain", "1")


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with server.client() as made:
        yield made
