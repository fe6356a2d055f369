"""A Kubernetes API server on the loopback, as far as the backend uses it. Its pods really run process 1."""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
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

MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
PROTOCOL = "v4.channel.k8s.io"
TOKEN = "a-token"
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
INPUT, OUTPUT, ERRORS, STATUS = range(4)
CHUNK = 1 << 15


class WebSocket:
    """The server's end, after the handshake."""

    def __init__(self, end: socket.socket, reader: Any) -> None:
        self._end, self._reader = end, reader
        self._lock = threading.Lock()
        self.pings = 0

    def send(self, channel: int, data: bytes) -> None:
        self._frame(BINARY, bytes((channel,)) + data)

    def _frame(self, opcode: int, data: bytes) -> None:
        size = len(data)
        length = (
            bytes((size,))
            if size < 126
            else struct.pack("!BH", 126, size)
            if size < 1 << 16
            else struct.pack("!BQ", 127, size)
        )
        with self._lock:
            self._end.sendall(bytes((0x80 | opcode,)) + length + data)

    def receive(self) -> tuple[int, bytes]:
        """Return channel and data of the next message; raise ``OSError`` at the end."""
        while True:
            first, second = self._exactly(2)
            size = second & 0x7F
            if size == 126:
                (size,) = struct.unpack("!H", self._exactly(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self._exactly(8))
            mask = self._exactly(4)
            masked = self._exactly(size)
            data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(masked))
            opcode = first & 0xF
            if opcode == CLOSE:
                raise OSError("closed")
            if opcode == PING:
                self.pings += 1
                self._frame(PONG, data)
            elif opcode in (BINARY, TEXT) and data:
                return data[0], data[1:]

    def _exactly(self, count: int) -> bytes:
        data = self._reader.read(count)
        if len(data) < count:
            raise OSError("cut")
        return data

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)


class Dropped(Exception):
    """Raised by what is called before an answer: the connection is cut instead."""


@dataclass
class FakePod:
    body: dict[str, Any]
    status: dict[str, Any] = field(default_factory=dict)
    web: WebSocket | None = None
    process: subprocess.Popen[bytes] | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    readers: list[threading.Thread] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.body["metadata"]["name"]

    def set(self, phase: str, **state: Any) -> None:
        self.status = {"phase": phase, "containerStatuses": [{"name": "box", "state": state}]}

    def run(self) -> None:
        (container,) = self.body["spec"]["containers"]
        volumes = {
            volume["name"]: int(volume["emptyDir"]["sizeLimit"]) for volume in self.body["spec"]["volumes"]
        }
        self.process = process_one.start(
            container["command"],
            {item["name"]: item["value"] for item in container["env"]},
            {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]},
            user=self.body["spec"]["securityContext"]["runAsUser"],
            read_only=container["securityContext"]["readOnlyRootFilesystem"],
        )
        self.set("Running", running={})
        threading.Thread(target=self._wait, daemon=True).start()

    def carry(self, web: WebSocket) -> None:
        """Join the pod's streams to an attached connection, until one of them ends."""
        self.web = web
        readers = [
            threading.Thread(target=self._output, args=(kind,), daemon=True) for kind in (OUTPUT, ERRORS)
        ]
        for reader in readers:
            reader.start()
        self.readers = readers
        assert self.process and self.process.stdin
        try:
            while True:
                channel, data = web.receive()
                assert channel == INPUT
                self.process.stdin.write(data)
        except (OSError, ValueError):
            pass
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def _output(self, kind: int) -> None:
        assert self.process and self.web
        source = self.process.stdout if kind == OUTPUT else self.process.stderr
        assert source
        with contextlib.suppress(OSError), source:
            while data := os.read(source.fileno(), CHUNK):
                self.web.send(kind, data)

    def _wait(self) -> None:
        assert self.process
        self.process.wait()
        for reader in self.readers:
            reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        if self.status.get("phase") == "Running":
            self.set("Succeeded", terminated={"exitCode": 0, "reason": "Completed"})
        if self.web:
            self.web.cut()
        self.ended.set()

    def kill(self) -> None:
        if self.process:
            process_one.end(self.process)
        if self.web:
            self.web.cut()
        self.ended.set()


class FakeCluster:
    """Life cycle: :meth:`start`, :meth:`stop`. Everything that was asked for is in ``asked``.

    failures: by endpoint, status and message to answer with. headers: of those answers. before: by endpoint,
    called first. outcome: what becomes of a new pod.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods: dict[str, FakePod] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.created: list[dict[str, Any]] = []
        self.patches: list[tuple[str, dict[str, Any], str]] = []
        self.failures: dict[str, tuple[int, str]] = {}
        self.headers: dict[str, str] = {}
        self.before: dict[str, Callable[[], None]] = {}
        self.outcome: Callable[[FakePod], None] = FakePod.run

    def start(self) -> None:
        class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 64

        class Handler(ClusterHandler):
            pass

        Handler.cluster = self
        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "somebody", "user": {"token": TOKEN}}],
            "contexts": [
                {"name": "fake", "context": {"cluster": "fake", "user": "somebody", "namespace": "boxes"}}
            ],
        }
        self.kubeconfig = self.folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(config))

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for pod in list(self.pods.values()):
            pod.kill()

    def add(self, body: dict[str, Any]) -> FakePod:
        pod = self.pods[body["metadata"]["name"]] = FakePod(copy.deepcopy(body))
        pod.set("Pending", waiting={"reason": "ContainerCreating"})
        return pod


class ClusterHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    cluster: FakeCluster

    def log_message(self, *_: Any) -> None: ...

    def answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int, message: str) -> None:
        self.answer(
            status,
            {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": status},
            self.cluster.headers,
        )

    def handle_any(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refuse(401, "Unauthorized")
            return
        for method, pattern, what in ROUTES:
            found = re.fullmatch(pattern, url.path)
            if method == self.command and found:
                self.cluster.asked.append(what)
                if before := self.cluster.before.get(what):
                    try:
                        before()
                    except Dropped:
                        self.close_connection = True
                        return
                if failure := self.cluster.failures.get(what):
                    self.refuse(*failure)
                    return
                getattr(self, f"do_{what}")(*found.groups(), query, body)
                return
        self.refuse(501, f"the fake cluster has no {self.command} {url.path}")

    do_GET = do_POST = do_DELETE = do_PATCH = handle_any

    def do_read_policy(self, name: str, *_: Any) -> None:
        if name in self.cluster.policies:
            self.answer(200, self.cluster.policies[name])
        else:
            self.refuse(404, f'networkpolicies.networking.k8s.io "{name}" not found')

    def do_create_policy(self, _query: Any, body: dict[str, Any]) -> None:
        self.cluster.policies[body["metadata"]["name"]] = body
        self.answer(201, body)

    def do_list(self, query: dict[str, str], _body: Any) -> None:
        label = query["labelSelector"]
        found = [pod for pod in self.cluster.pods.values() if label in pod.body["metadata"].get("labels", {})]
        self.answer(
            200,
            {
                "kind": "PodList",
                "apiVersion": "v1",
                "metadata": {},
                "items": [{**pod.body, "status": pod.status} for pod in found],
            },
        )

    def do_create(self, _query: Any, body: dict[str, Any]) -> None:
        name = body["metadata"]["name"]
        if name in self.cluster.pods:
            self.refuse(409, f'pods "{name}" already exists')
            return
        self.cluster.created.append(body)
        pod = self.cluster.add(body)
        self.answer(201, {**body, "status": pod.status})
        self.cluster.outcome(pod)

    def known(self, name: str) -> FakePod | None:
        pod = self.cluster.pods.get(name)
        if pod is None:
            self.refuse(404, f'pods "{name}" not found')
        return pod

    def do_read(self, name: str, *_: Any) -> None:
        if pod := self.known(name):
            self.answer(200, {**pod.body, "status": pod.status})

    def do_patch(self, name: str, _query: Any, body: dict[str, Any]) -> None:
        if pod := self.known(name):
            self.cluster.patches.append((name, body, self.headers["Content-Type"]))
            pod.body["metadata"]["annotations"].update(body["metadata"]["annotations"])
            self.answer(200, pod.body)

    def do_delete(self, name: str, query: dict[str, str], _body: Any) -> None:
        if pod := self.known(name):
            assert query["gracePeriodSeconds"] == "0"
            pod.kill()
            self.cluster.pods.pop(name, None)
            self.answer(200, pod.body)

    def do_attach(self, name: str, query: dict[str, str], _body: Any) -> None:
        assert query == {
            "container": "box",
            "stdin": "true",
            "stdout": "true",
            "stderr": "true",
            "tty": "false",
        }
        assert PROTOCOL in self.headers["Sec-WebSocket-Protocol"]
        if pod := self.known(name):
            accept = base64.b64encode(hashlib.sha1(self.headers["Sec-WebSocket-Key"].encode() + MAGIC).digest())
            self.close_connection = True
            self.wfile.write(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Accept: "
                + accept
                + b"\r\nSec-WebSocket-Protocol: "
                + PROTOCOL.encode()
                + b"\r\n\r\n"
            )
            pod.carry(WebSocket(self.connection, self.rfile))


PODS = "/api/v1/namespaces/boxes/pods"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/boxes/networkpolicies"
ROUTES = (
    ("GET", f"{POLICIES}/([^/]+)", "read_policy"),
    ("POST", POLICIES, "create_policy"),
    ("GET", PODS, "list"),
    ("POST", PODS, "create"),
    ("GET", f"{PODS}/([^/]+)", "read"),
    ("PATCH", f"{PODS}/([^/]+)", "patch"),
    ("DELETE", f"{PODS}/([^/]+)", "delete"),
    ("GET", f"{PODS}/([^/]+)/attach", "attach"),
)
