"""Server-sent events: reads a stream, and resumes it where it broke off."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse

from ._http import Call, Transport, jitter, refusal
from .errors import NoAnswer, NoConnection, UnexpectedAnswer, WeirError

# A comment comes every 15 or 30 s, so a stream that is silent for longer is dead.
SILENCE = 75.0
LINE_MAX = 1 << 20


@dataclass
class RawEvent:
    type: str = "message"
    id: str = ""
    data: str = ""


def events(
    transport: Transport, path: str, query: Mapping[str, str | None], last_event_id: str, silence: float
) -> Iterator[RawEvent]:
    """Never ends by itself: a stream that ends or breaks is opened again. Raises what a repetition cannot mend."""
    attempt = 0
    while True:
        wait = 0.0
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_event_id} if last_event_id else {})
        call = Call("GET", path, query=query, headers=headers)
        try:
            connection, sock, response = transport.open(call, None, transport.attempt_timeout, fresh=True)
            try:
                if response.status != 200:
                    raise refusal(response, response.read())
                sock.settimeout(silence)
                for event in _parse(response):
                    attempt = 0
                    last_event_id = event.id or last_event_id
                    yield event
            finally:
                response.close()
                connection.close()
        except WeirError as error:
            transient = error.status >= 500 or error.status in (408, 429) or isinstance(error, (NoAnswer, NoConnection))
            if not transient:
                raise
            wait = error.retry_after or 0
        except (OSError, HTTPException):
            pass
        time.sleep(wait + jitter(attempt))
        attempt += 1


def _parse(response: HTTPResponse) -> Iterator[RawEvent]:
    event, data = RawEvent(), list[str]()
    while line := response.readline(LINE_MAX):
        if not line.endswith(b"\n"):
            if len(line) >= LINE_MAX:
                raise UnexpectedAnswer("UNEXPECTED_ANSWER", "a line of the stream is longer than 1 MiB")
            return
        name, _, value = line.decode().rstrip("\r\n").partition(":")
        value = value.removeprefix(" ")
        if line.strip() == b"":
            if data:
                event.data = "\n".join(data)
                yield event
            event, data = RawEvent(), []
        elif name == "data":
            data.append(value)
        elif name == "event":
            event.type = value
        elif name == "id":
            event.id = value
