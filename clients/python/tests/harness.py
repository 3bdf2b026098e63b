"""A real server of the tests' own, and a stand-in before it that loses, delays and refuses on demand."""

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[3]
BINARY = Path(os.environ.get("WEIR_BINARY", ROOT / "target/debug/weir")).resolve()
ADMIN_KEY = "the-admin-key-of-these-tests"


class Server:
    def __init__(self) -> None:
        self._data = tempfile.mkdtemp(prefix="weir-client-")
        environment = os.environ | {
            "WEIR_ADMIN_KEY": ADMIN_KEY,
            "WEIR_DATA": self._data,
            "WEIR_LISTEN": "127.0.0.1:0",
            "WEIR_GRPC_LISTEN": "127.0.0.1:0",
            "WEIR_REQUEST_WEBHOOK_ALLOW_PRIVATE": "true",
            "WEIR_SALE_USER_PER_SECOND": "0",
        }
        self._process = subprocess.Popen([BINARY, "serve"], cwd=self._data, env=environment, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if ready := re.search(r"http://127\.0\.0\.1:\d+", line):
                self.url = ready[0]
                break
        else:
            raise RuntimeError(f"the server ended with {self._process.wait()}")
        threading.Thread(target=self._process.stdout.read, daemon=True).start()
        scopes = "requests:create,requests:read,limits:check"
        command = [str(BINARY), "token", "--sub", "a@b.c", "--tenant", "acme", "--scope", scopes]
        self.token = subprocess.run(command, cwd=self._data, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._data, ignore_errors=True)


@dataclass
class Answer:
    status: int
    body: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    at: float


# `lose` passes the call on and breaks the connection instead of answering; `hang` never answers; `cut` answers in part.
Behaviour = str | Answer


class StandIn:
    """Behaves as told, one call after the other, and then passes everything on."""

    def __init__(self, upstream: str, *behaviours: Behaviour) -> None:
        self.seen: list[Seen] = []
        self.behaviours = list(behaviours)
        self.upstream = urlsplit(upstream)
        self.connections: list[socket.socket] = []
        self.stopped = threading.Event()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None: ...

            def do_GET(self) -> None:
                stand_in.handle(self)

            do_POST = do_PUT = do_DELETE = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def cut(self) -> None:
        """Breaks all connections."""
        connections, self.connections = self.connections, []
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def stop(self) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self.cut()

    def handle(self, call: BaseHTTPRequestHandler) -> None:
        body = call.rfile.read(int(call.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in call.headers.items()}
        self.connections.append(call.connection)
        self.seen.append(Seen(call.command, call.path, headers, body, time.monotonic()))
        behaviour: Behaviour | None = self.behaviours.pop(0) if self.behaviours else None
        if isinstance(behaviour, Answer):
            data = json.dumps(behaviour.body).encode()
            call.send_response(behaviour.status)
            for name, value in (behaviour.headers | {"Content-Length": str(len(data))}).items():
                call.send_header(name, value)
            call.end_headers()
            call.wfile.write(data)
            return
        call.close_connection = True
        if behaviour == "hang":
            self.stopped.wait()
        elif behaviour == "cut":
            call.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"status":')
        else:
            self._pass_on(call, body, lose=behaviour == "lose")

    def _pass_on(self, call: BaseHTTPRequestHandler, body: bytes, *, lose: bool) -> None:
        assert self.upstream.hostname is not None
        upstream = http.client.HTTPConnection(self.upstream.hostname, self.upstream.port)
        upstream.request(call.command, call.path, body or None, dict(call.headers.items()))
        answer = upstream.getresponse()
        if lose:
            answer.read()
            upstream.close()
            return
        call.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("transfer-encoding", "connection"):
                call.send_header(name, value)
        call.send_header("Connection", "close")
        call.end_headers()
        # `read` waits for all that it is asked for; until Python 3.12 `read1` does not end where Content-Length says.
        read = answer.read1 if answer.length is None else answer.read
        while chunk := read(65_536):
            call.wfile.write(chunk)
        upstream.close()
