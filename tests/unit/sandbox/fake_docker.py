"""A Docker Engine on a Unix socket, as far as the backend uses it. Its containers really run process 1."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import socketserver
import struct
import subprocess
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import process_one

CHUNK = 1 << 16
OUTPUT, ERRORS = 1, 2


@dataclass
class FakeContainer:
    id: str
    name: str
    body: dict[str, Any]
    state: str = "created"
    oom_killed: bool = False
    end: socket.socket | None = None
    process: subprocess.Popen[bytes] | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    readers: list[threading.Thread] = field(default_factory=list)

    def run(self) -> None:
        held = self.body["HostConfig"]
        disks = {path: int(re.search(r"size=(\d+)", options)[1]) for path, options in held["Tmpfs"].items()}  # type: ignore[index]
        self.process = process_one.start(
            self.body["Entrypoint"],
            dict(entry.split("=", 1) for entry in self.body["Env"]),
            {**disks, "/dev/shm": held["ShmSize"]},
            user=int(self.body["User"].partition(":")[0]),
            read_only=held["ReadonlyRootfs"],
            profile=json.loads(held["SecurityOpt"][1].removeprefix("seccomp=")),
        )
        self.state = "running"
        self.readers = [
            threading.Thread(target=self._output, args=(kind,), daemon=True) for kind in (OUTPUT, ERRORS)
        ]
        for thread in (
            *self.readers,
            *(threading.Thread(target=w, daemon=True) for w in (self._input, self._wait)),
        ):
            thread.start()

    def _input(self) -> None:
        assert self.process and self.process.stdin and self.end
        try:
            while data := self.end.recv(CHUNK):
                self.process.stdin.write(data)
        except (OSError, ValueError):
            pass
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def _output(self, kind: int) -> None:
        assert self.process and self.end
        source = self.process.stdout if kind == OUTPUT else self.process.stderr
        assert source
        with contextlib.suppress(OSError), source:
            while data := os.read(source.fileno(), CHUNK):
                self.end.sendall(struct.pack(">BxxxL", kind, len(data)) + data)

    def _wait(self) -> None:
        assert self.process
        self.process.wait()
        for reader in self.readers:
            reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        self.state = "exited"
        self.cut()
        self.ended.set()

    def cut(self) -> None:
        """Cut the attached stream."""
        if self.end:
            with contextlib.suppress(OSError):
                self.end.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        if self.process:
            process_one.end(self.process)
        self.cut()
        self.ended.set()


class FakeEngine:
    """Life cycle: :meth:`start`, :meth:`stop`. Everything that was asked for is in ``asked``.

    failures: by endpoint, status and message to answer with. before: by endpoint, called first.
    """

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "engine.sock")
        self.address = f"unix://{self.path}"
        self.images: dict[str, dict[str, Any]] = {"python:3.12-slim": {}}
        self.containers: dict[str, FakeContainer] = {}
        self.asked: list[str] = []
        self.created: list[dict[str, Any]] = []
        self.failures: dict[str, tuple[int, str]] = {}
        self.before: dict[str, Callable[[], None]] = {}
        self._number = 0

    def start(self) -> None:
        engine = self

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True
            request_queue_size = 64

        class Handler(EngineHandler):
            pass

        Handler.engine = engine
        self._server = Server(self.path, Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for container in list(self.containers.values()):
            container.kill()

    def add(self, name: str, body: dict[str, Any], state: str = "created") -> FakeContainer:
        self._number += 1
        container = FakeContainer(f"{self._number:064x}", name, body, state)
        self.containers[container.id] = container
        return container

    def find(self, key: str) -> FakeContainer | None:
        return next((c for c in self.containers.values() if key in (c.id, c.name)), None)


class EngineHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: FakeEngine

    def log_message(self, *_: Any) -> None: ...

    def address_string(self) -> str:
        return "unix"

    def answer(self, status: int, body: Any = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_any(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        path = re.sub(r"^/v1\.\d+", "", urllib.parse.unquote(url.path))
        query = dict(urllib.parse.parse_qsl(url.query))
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        for method, pattern, what in ROUTES:
            found = re.fullmatch(pattern, path)
            if method == self.command and found:
                self.engine.asked.append(what)
                if before := self.engine.before.get(what):
                    before()
                if failure := self.engine.failures.get(what):
                    self.answer(failure[0], {"message": failure[1]})
                    return
                getattr(self, f"do_{what}")(*found.groups(), query, body)
                return
        self.answer(501, {"message": f"the fake engine has no {self.command} {path}"})

    do_GET = do_POST = do_DELETE = handle_any

    def do_version(self, *_: Any) -> None:
        self.answer(200, {"ApiVersion": "1.47", "MinAPIVersion": "1.24", "Version": "27.3.1"})

    def do_list(self, query: dict[str, str], _body: Any) -> None:
        assert query["all"] == "1"
        (label,) = json.loads(query["filters"])["label"]
        found = [c for c in self.engine.containers.values() if label in c.body.get("Labels", {})]
        self.answer(
            200,
            [
                {"Id": c.id, "Names": [f"/{c.name}"], "Labels": c.body["Labels"], "State": c.state}
                for c in found
            ],
        )

    def do_image(self, name: str, *_: Any) -> None:
        if name in self.engine.images:
            self.answer(200, {"Id": "sha256:0", "Config": self.engine.images[name]})
        else:
            self.answer(404, {"message": f"No such image: {name}"})

    def do_create(self, query: dict[str, str], body: dict[str, Any]) -> None:
        if self.engine.find(query["name"]):
            self.answer(409, {"message": f'Conflict. The container name "/{query["name"]}" is already in use'})
            return
        self.engine.created.append(body)
        self.answer(201, {"Id": self.engine.add(query["name"], body).id, "Warnings": []})

    def known(self, key: str) -> FakeContainer | None:
        container = self.engine.find(key)
        if container is None:
            self.answer(404, {"message": f"No such container: {key}"})
        return container

    def do_attach(self, key: str, query: dict[str, str], _body: Any) -> None:
        assert {name: query[name] for name in ("stdin", "stdout", "stderr", "stream")} == dict.fromkeys(
            ("stdin", "stdout", "stderr", "stream"), "1"
        )
        if container := self.known(key):
            self.close_connection = True
            container.end = self.connection
            self.wfile.write(
                b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.multiplexed-stream\r\n"
                b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
            )
            container.ended.wait()

    def do_start(self, key: str, *_: Any) -> None:
        if container := self.known(key):
            container.run()
            self.answer(204)

    def do_inspect(self, key: str, *_: Any) -> None:
        if container := self.known(key):
            state = {"Status": container.state, "OOMKilled": container.oom_killed}
            self.answer(200, {"Id": container.id, "State": state})

    def do_remove(self, key: str, query: dict[str, str], _body: Any) -> None:
        if container := self.known(key):
            assert query["force"] == "True" or query["force"] == "1"
            container.kill()
            del self.engine.containers[container.id]
            self.answer(204)


ROUTES = (
    ("GET", "/version", "version"),
    ("GET", "/containers/json", "list"),
    ("GET", "/images/(.+)/json", "image"),
    ("POST", "/containers/create", "create"),
    ("POST", "/containers/([^/]+)/attach", "attach"),
    ("POST", "/containers/([^/]+)/start", "start"),
    ("GET", "/containers/([^/]+)/json", "inspect"),
    ("DELETE", "/containers/([^/]+)", "remove"),
)
