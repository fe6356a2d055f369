"""Clients that leave, and servers that are stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from .conftest import LOOP, NAME, TOKEN, Running, Script, Start

ENDLESS = 30_000


def wait_until(what: Callable[[], bool], limit_s: float = 20.0) -> float:
    begun = time.monotonic()
    while not what():
        assert time.monotonic() - begun < limit_s, "it did not come to pass"
        time.sleep(0.02)
    return time.monotonic() - begun


def test_a_stream_that_is_closed_frees_its_requests(server: Running, script: Script) -> None:
    with server.client() as client:
        stream = client.completions.create(
            model=NAME, prompt=[script.ids[LOOP]], max_tokens=ENDLESS, n=3, stream=True
        )
        next(iter(stream))
        assert server.metric("running") == 3
        stream.close()
        assert wait_until(lambda: server.metric("running") == 0) < 2
    before = server.metric("output_tokens_total")
    assert before < ENDLESS
    time.sleep(0.3)
    assert server.metric("output_tokens_total") == before


def test_a_client_that_does_not_wait_frees_its_request(server: Running, script: Script) -> None:
    with server.client(timeout=1.0) as client, pytest.raises(openai.APITimeoutError):
        client.completions.create(model=NAME, prompt=[script.ids[LOOP]], max_tokens=ENDLESS)
    assert wait_until(lambda: server.metric("running") + server.metric("waiting") == 0) < 2
    assert server.metric('requests_total{path="/v1/completions",status="499"}') >= 1


class Asking(threading.Thread):
    """Asks for a completion of many tokens in another thread."""

    def __init__(self, server: Running, script: Script, tokens: int, stream: bool) -> None:
        super().__init__()
        self.server, self.script, self.tokens, self.stream = server, script, tokens, stream
        self.text, self.error = "", None
        self.finish: Any = None

    def run(self) -> None:
        try:
            with self.server.client() as client:
                done: Any = client.completions.create(
                    model=NAME, prompt=[self.script.ids[LOOP]], max_tokens=self.tokens, stream=self.stream
                )
                for part in done if self.stream else [done]:
                    self.text += part.choices[0].text
                    self.finish = part.choices[0].finish_reason
        except openai.APIError as error:
            self.error: Any = error


@pytest.mark.parametrize(
    ("number", "status", "stream"), [(signal.SIGTERM, 143, True), (signal.SIGINT, 130, False)]
)
def test_stopping_lets_what_runs_end_and_takes_nothing_new(
    start: Start, script: Script, number: int, status: int, stream: bool
) -> None:
    server = start(script.folder, "--drain", "30")
    asking = Asking(server, script, 2000, stream)
    asking.start()
    wait_until(lambda: server.metric("running") == 1)
    begun = time.monotonic()
    server.process.send_signal(number)
    wait_until(lambda: not answers(server), 5)
    assert asking.is_alive(), f"it ended {time.monotonic() - begun:.1f} s later; ask for more tokens"
    assert server.process.wait(40) == status
    asking.join(10)
    assert asking.error is None and asking.finish == "length" and asking.text == LOOP * 2000


def answers(server: Running) -> bool:
    try:
        with server.client(timeout=1) as client:
            client.models.list()
    except openai.APIConnectionError:
        return False
    return True


def test_stopping_ends_what_takes_too_long(start: Start, script: Script) -> None:
    server = start(script.folder, "--drain", "0.5")
    both = [Asking(server, script, ENDLESS, stream) for stream in (True, False)]
    for asking in both:
        asking.start()
    wait_until(lambda: server.metric("running") == 2)
    begun = time.monotonic()
    assert server.end() == 143 and time.monotonic() - begun < 8
    for asking in both:
        asking.join(10)
        assert asking.error is not None and asking.error.code == "shutting_down"
        assert bool(asking.text) == asking.stream


def test_a_token_that_was_given_is_not_printed(start: Start, script: Script) -> None:
    server = start(script.folder, "--name", "another")
    with server.client() as client:
        assert [model.id for model in client.models.list()] == ["another"]
    assert server.process.stdout is not None
    said = server.first_line
    while not said.endswith("Ctrl-C stops it.\n"):
        said += server.process.stdout.readline()
    code = re.sub("(?m)^.{9}", "", said[said.index("python   ") : said.index("\nWhere a shell")])
    tried = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"LEHR_TOKEN": TOKEN}, capture_output=True, timeout=60
    )
    assert tried.returncode == 0, tried.stderr.decode()
    assert server.end() == 143
    said += server.process.stdout.read()
    assert TOKEN not in said and "serving another" in said and server.address in said
    assert "curl " in said and "OpenAI(base_url=" in said


def test_a_token_is_made_up_and_a_deadline_holds(start: Start, script: Script) -> None:
    server = start(script.folder, "--json", "--timeout", "0.5", token=None)
    known = json.loads(server.first_line)
    assert set(known) == {"model", "address", "token"} and len(known["token"]) >= 32
    for stream in (False, True):
        asking = Asking(server, script, ENDLESS, stream)
        asking.start()
        asking.join(20)
        assert asking.error is not None and asking.error.code == "deadline_exceeded"
        assert bool(asking.text) == stream
    assert wait_until(lambda: server.metric("running") == 0) < 2
    server.end()


def test_too_many_are_told_to_come_back(start: Start, script: Script) -> None:
    server = start(script.folder, "--max-running", "1", "--max-waiting", "0")
    asking = Asking(server, script, 3000, stream=False)
    asking.start()
    wait_until(lambda: server.metric("running") == 1)
    for stream in (True, False):
        with server.client() as client, pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=NAME, prompt="x", stream=stream)
        assert int(caught.value.response.headers["retry-after"]) >= 1
    asking.join(30)
    assert asking.finish == "length"
    with server.client() as client:
        client.completions.create(model=NAME, prompt="x")
    server.end()
