"""One call to the server, repeated as often as is safe and its time allows."""

import http.client
import json
import random
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

from .errors import NoAnswer, NoConnection, UnexpectedAnswer, WeirError, class_of

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_WAIT = 0.1
LONGEST_WAIT = 5.0
IDLE_MAX = 32
CHUNK = 65_536

T = TypeVar("T")


def jitter(attempt: int) -> float:
    """Full jitter: anything up to a bound that doubles with each attempt."""
    return random.uniform(0, min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(attempt, 16)))


@dataclass
class Call:
    """`body` is sent as it is if it is text, else as JSON. `repeatable`: also when nobody knows whether it was done."""

    method: str
    path: str
    body: Any = None
    query: Mapping[str, str | None] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = False
    deadline: float | None = None
    attempt_timeout: float | None = None
    idempotency_key: str | None = None


class Transport:
    """Keeps idle connections for reuse; safe to use from several threads."""

    def __init__(
        self,
        url: str,
        token: str | Callable[[], str] | None,
        admin_key: str | None,
        deadline: float,
        attempt_timeout: float,
        ssl_context: ssl.SSLContext | None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"url is http:// or https:// and a host, not {url!r}")
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        self._ssl = (ssl_context or ssl.create_default_context()) if parts.scheme == "https" else None
        self._token = token
        self._admin_key = admin_key
        self.deadline = deadline
        self.attempt_timeout = attempt_timeout
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def call(self, call: Call, read: Callable[[bytes], T]) -> T:
        """`read` raises ValueError where the answer is not what it should be; that counts as no answer."""
        body = call.body if call.body is None or isinstance(call.body, str) else json.dumps(call.body)
        end = time.monotonic() + (self.deadline if call.deadline is None else call.deadline)
        attempt = 0
        while True:
            left = max(0.001, end - time.monotonic())
            try:
                return self._attempt(call, body, min(left, call.attempt_timeout or self.attempt_timeout), read)
            except WeirError as error:
                error.idempotency_key = call.idempotency_key
                transient = error.status in RETRIED and error.code != "SLOTS_EXHAUSTED"
                transient = transient or isinstance(error, NoConnection) or error.outcome_unknown
                wait = (error.retry_after or 0) + jitter(attempt)
                safe = call.repeatable or not error.outcome_unknown
                if not transient or not safe or time.monotonic() + wait >= end:
                    raise
            attempt += 1
            time.sleep(wait)

    def _attempt(self, call: Call, body: str | None, timeout: float, read: Callable[[bytes], T]) -> T:
        end = time.monotonic() + timeout
        connection, sock, response = self.open(call, body, timeout)
        whole = False
        try:
            data = b""
            while not response.isclosed():
                data += _within(sock, end, lambda: response.read(CHUNK))
            # `read` gives less than Content-Length says without a word.
            if response.length:
                raise NoAnswer("NO_ANSWER", "the answer is cut short, so the outcome is unknown", outcome_unknown=True)
            whole = not response.will_close
        finally:
            self._give_back(connection, whole)
        request_id = response.headers.get("X-Request-Id")
        if not 200 <= response.status < 300:
            raise refusal(response, data)
        try:
            return read(data)
        except ValueError as error:
            message = f"the answer cannot be read: {error}"
            raise UnexpectedAnswer(
                "UNEXPECTED_ANSWER", message, status=response.status, request_id=request_id, outcome_unknown=True
            ) from error

    def open(
        self, call: Call, body: str | None, timeout: float, fresh: bool = False
    ) -> tuple[http.client.HTTPConnection, socket.socket, http.client.HTTPResponse]:
        """Sends the call and waits for the head of its answer. Whoever gets the connection closes it."""
        headers = self._headers(call, body)
        end = time.monotonic() + timeout
        connection = (None if fresh else self._take()) or self._connect(timeout)
        query = urlencode({name: value for name, value in call.query.items() if value is not None})
        # An answer that ends with its connection takes the socket away from it.
        sock: socket.socket = connection.sock
        target = self._prefix + call.path + (f"?{query}" if query else "")
        try:
            data = None if body is None else body.encode()
            _within(sock, end, lambda: connection.request(call.method, target, data, headers))
            return connection, sock, _within(sock, end, connection.getresponse)
        except BaseException:
            connection.close()
            raise

    def _headers(self, call: Call, body: str | None) -> dict[str, str]:
        headers = dict(call.headers)
        token = self._token() if callable(self._token) else self._token
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        if self._admin_key is not None:
            headers["X-Admin-Key"] = self._admin_key
        if body is not None:
            headers.setdefault("Content-Type", "application/json")
        return headers

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._ssl is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        else:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=self._ssl)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise NoConnection("NO_CONNECTION", f"cannot connect to {self._host}: {error}") from error
        return connection

    def _take(self) -> http.client.HTTPConnection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            # One that can be read has been closed by the server.
            with selectors.DefaultSelector() as selector:
                selector.register(connection.sock, selectors.EVENT_READ)
                if not selector.select(0):
                    return connection
            connection.close()

    def _give_back(self, connection: http.client.HTTPConnection, whole: bool) -> None:
        with self._lock:
            if whole and connection.sock is not None and len(self._idle) < IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()


def _within(sock: socket.socket, end: float, step: Callable[[], T]) -> T:
    try:
        sock.settimeout(max(0.001, end - time.monotonic()))
        return step()
    except (OSError, http.client.HTTPException) as error:
        message = f"no answer, so the outcome is unknown: {error or type(error).__name__}"
        raise NoAnswer("NO_ANSWER", message, outcome_unknown=True) from error


def refusal(response: http.client.HTTPResponse, data: bytes) -> WeirError:
    """Both forms of error bodies: the flat one, and that of sale. Only 5xx and 408 leave open what was done."""
    body: Any = None
    try:
        body = json.loads(data)
        body = body["error"] if isinstance(body.get("error"), dict) else body
    except (ValueError, AttributeError):
        pass  # Of a proxy in between.
    body = body if isinstance(body, dict) else {}
    code = str(body.get("code", "UNEXPECTED_ANSWER"))
    after = response.headers.get("Retry-After", "")
    return class_of(code)(
        code,
        str(body.get("message", f"HTTP {response.status}")),
        status=response.status,
        request_id=response.headers.get("X-Request-Id"),
        retry_after=float(after) if after.isdecimal() else None,
        outcome_unknown=response.status >= 500 or response.status == 408,
    )
