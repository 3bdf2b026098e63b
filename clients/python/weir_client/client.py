"""The client: one method per call, by capability. Times are seconds."""

import json
import ssl
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import quote

from ._http import Call, Transport, jitter
from ._sse import SILENCE, events
from .errors import AlreadyFinal, NotFinal, WeirError, class_of
from .types import (
    Accepted, Cancelled, Check, Decision, Hold, Purchase, PurchaseOutcome, Quota, Released, RequestState, Sale,
    SaleEvent, Sent, Settled, Slot, SlotEvent, SlotFailure,
)

BULK_LINES = 1_000
LONG_POLL = 20.0
FINAL = frozenset({"COMPLETED", "FAILED_PERMANENT", "FAILED_RETRY_EXHAUSTED", "CANCELLED"})


class WeirClient:
    """`token` is a bearer token, or what gives a valid one before each attempt. `deadline` is how long a call may take
    with all its attempts; waits that would go beyond it are not begun. `attempt_timeout` is how long one may take."""

    def __init__(
        self,
        url: str,
        *,
        token: str | Callable[[], str] | None = None,
        admin_key: str | None = None,
        deadline: float = 15,
        attempt_timeout: float = 5,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._transport = Transport(url, token, admin_key, deadline, attempt_timeout, ssl_context)
        self.quota = QuotaCalls(self._transport)
        self.slots = SlotCalls(self._transport)
        self.limits = LimitCalls(self._transport)
        self.requests = RequestCalls(self._transport)
        self.sales = SaleCalls(self._transport)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str | None] | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Any other route. A POST is repeated after a lost answer only with `repeatable=True`."""
        repeatable = method in ("GET", "PUT", "DELETE") if repeatable is None else repeatable
        return self._transport.call(Call(method, path, body, query or {}, headers or {}, repeatable, deadline), _json)

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Calls:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def _get(self, path: str, deadline: float | None, query: Mapping[str, str | None] | None = None, **headers: str) -> Any:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._transport.call(Call("GET", path, None, query or {}, names, True, deadline), _json)

    def _delete(self, path: str, deadline: float | None) -> None:
        self._transport.call(Call("DELETE", path, repeatable=True, deadline=deadline), _json)

    def _post(
        self, path: str, body: Any, repeatable: bool, deadline: float | None, key: str | None = None, **headers: str
    ) -> Any:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        call = Call("POST", path, body, {}, names, repeatable, deadline, idempotency_key=key)
        return self._transport.call(call, _json)


class QuotaCalls(_Calls):
    def configure(
        self, user_id: str, rate_limit: int, time_window: int, *, keep_count: bool = False, deadline: float | None = None
    ) -> Quota:
        """The window is in minutes. Begins a new one, so it is repeated after a lost answer only with `keep_count`."""
        body = {"userId": user_id, "rateLimit": rate_limit, "timeWindow": time_window, "keepCount": keep_count}
        return cast(Quota, self._post("/api/config", body, keep_count, deadline))

    def get(self, user_id: str, *, deadline: float | None = None) -> Quota:
        return cast(Quota, self._get(f"/api/config/{_segment(user_id)}", deadline))

    def remove(self, user_id: str, *, deadline: float | None = None) -> None:
        self._delete(f"/api/config/{_segment(user_id)}", deadline)

    def send(self, user_id: str, message: str, *, idempotency_key: str | None = None, deadline: float | None = None) -> Sent:
        """The key is made for each call unless given. Give your own where it may be made again after a restart."""
        key = idempotency_key or str(uuid.uuid4())
        body = {"userId": user_id, "message": message}
        return cast(Sent, self._post("/api/send", body, True, deadline, key, Idempotency_Key=f'"{key}"'))


class SlotCalls(_Calls):
    def assign(self, event: SlotEvent, *, deadline: float | None = None) -> Slot:
        return cast(Slot, self._post("/api/v1/slots", event, True, deadline))

    def get(self, event_id: str, *, deadline: float | None = None) -> Slot:
        return cast(Slot, self._get(_slot_path(event_id), deadline))

    def remove(self, event_id: str, *, deadline: float | None = None) -> None:
        self._delete(_slot_path(event_id), deadline)

    def bulk(self, events: Iterable[SlotEvent], *, deadline: float | None = None) -> Iterator[Slot | SlotFailure]:
        """Answers in the order of the events, uploaded 1,000 at a time. The deadline is that of each upload."""
        before, rest = 0, iter(events)
        while batch := list(islice(rest, BULK_LINES)):
            yield from self._upload(batch, before, self._transport.deadline if deadline is None else deadline)
            before += len(batch)

    def _upload(self, batch: list[SlotEvent], before: int, deadline: float) -> list[Slot | SlotFailure]:
        """Uploads again what the server could not decide at the moment."""
        end = time.monotonic() + deadline
        answers: dict[int, Slot | SlotFailure] = {}
        undecided = list(range(len(batch)))
        attempt = 0
        while True:
            left = max(0.001, end - time.monotonic())
            body = "".join(json.dumps(batch[index]) + "\n" for index in undecided)
            ndjson = {"Content-Type": "application/x-ndjson"}
            call = Call("POST", "/api/v1/slots/bulk", body, {}, ndjson, True, left, left)
            lines = self._transport.call(call, lambda data: _lines(data, len(undecided)))
            again = []
            for index, line in zip(undecided, lines, strict=True):
                if "code" in line:
                    line["line"] = before + index + 1
                    again += [index] if line["code"] == "DEPENDENCY_UNAVAILABLE" else []
                answers[index] = cast(Slot | SlotFailure, line)
            undecided = again
            wait = 0.5 + jitter(attempt)
            if not undecided or time.monotonic() + wait >= end:
                return [answers[index] for index in range(len(batch))]
            time.sleep(wait)
            attempt += 1


class LimitCalls(_Calls):
    def check(
        self, *checks: Check, peek: bool = False, explain: bool = False, deadline: float | None = None
    ) -> Decision:
        """One decision about all checks. Not repeated after a lost answer unless it spends nothing."""
        free = peek or all(check.get("cost") == 0 for check in checks)
        return cast(Decision, self._post("/v1/check", {"checks": checks, "peek": peek, "explain": explain}, free, deadline))

    def hold(self, policy: str, key: str, cost: int, *, ttl: str = "PT1M", deadline: float | None = None) -> Hold:
        """Not repeated after a lost answer: the first hold would be spent when it expires."""
        return cast(Hold, self._post("/v1/hold", {"policy": policy, "key": key, "cost": cost, "ttl": ttl}, False, deadline))

    def settle(self, hold_id: str, cost: int, *, deadline: float | None = None) -> Settled:
        return cast(Settled, self._post("/v1/settle", {"holdId": hold_id, "cost": cost}, True, deadline))

    def release(self, permit_id: str, *, deadline: float | None = None) -> Released:
        return cast(Released, self._post("/v1/release", {"permitId": permit_id}, True, deadline))


class RequestCalls(_Calls):
    def submit(
        self,
        request_type: str,
        payload: Any,
        *,
        callback_url: str | None = None,
        idempotency_key: str | None = None,
        deadline: float | None = None,
    ) -> Accepted:
        key = idempotency_key or str(uuid.uuid4())
        body = {"idempotencyKey": key, "requestType": request_type, "payload": payload, "callbackUrl": callback_url}
        return cast(Accepted, self._post("/v1/requests", body, True, deadline, key))

    def get(self, request_id: str, *, deadline: float | None = None) -> RequestState:
        return cast(RequestState, self._get(f"/v1/requests/{_segment(request_id)}", deadline))

    def wait(self, request_id: str, *, timeout: float = 60) -> RequestState:
        """Asks by long polls, and without waiting where the server has no place left for one more caller that waits."""
        end = time.monotonic() + timeout
        before, attempt = None, 0
        while True:
            began = time.monotonic()
            wait = min(LONG_POLL, max(0.0, end - began))
            longest = wait + self._transport.attempt_timeout
            query = {"wait": f"{int(wait * 1000)}ms" if wait >= 0.001 else None}
            path = f"/v1/requests/{_segment(request_id)}"
            try:
                # Its own repetitions would wait again, so the first 503 ends it.
                call = Call("GET", path, query=query, deadline=longest, attempt_timeout=longest)
                state = cast(RequestState, self._transport.call(call, _json))
            except WeirError as error:
                if not error.outcome_unknown:
                    raise
                state = self.get(request_id)
            if state["status"] in FINAL:
                return state
            now = time.monotonic()
            if now >= end:
                raise NotFinal("NOT_FINAL", f"request {request_id} is still {state['status']}")
            if now - began < wait / 2 and state["status"] == before:
                time.sleep(min(0.05 + jitter(attempt), end - now))
            before, attempt = state["status"], attempt + 1

    def submit_and_wait(
        self,
        request_type: str,
        payload: Any,
        *,
        timeout: float = 60,
        callback_url: str | None = None,
        idempotency_key: str | None = None,
        deadline: float | None = None,
    ) -> RequestState:
        key = idempotency_key or str(uuid.uuid4())
        accepted = self.submit(request_type, payload, callback_url=callback_url, idempotency_key=key, deadline=deadline)
        try:
            return self.wait(accepted["requestId"], timeout=timeout)
        except WeirError as error:
            error.idempotency_key = key
            raise

    def cancel(self, request_id: str, *, deadline: float | None = None) -> Cancelled:
        """Succeeds too if it was cancelled before, as by an attempt whose answer was lost."""
        try:
            return cast(Cancelled, self._post(f"/v1/requests/{_segment(request_id)}/cancel", None, True, deadline))
        except AlreadyFinal:
            if self.get(request_id, deadline=deadline)["status"] != "CANCELLED":
                raise
            return {"requestId": request_id, "status": "CANCELLED"}


class SaleCalls(_Calls):
    def status(self, sku: str | None = None, *, deadline: float | None = None) -> Sale:
        return cast(Sale, self._get("/api/v1/sales", deadline, {"sku": sku})["data"])

    def purchase(self, sku: str, user_id: str, *, deadline: float | None = None) -> Purchase:
        return cast(Purchase, self._get("/api/v1/purchases", deadline, {"sku": sku}, X_User_Id=user_id)["data"])

    def attempt(
        self, sku: str, user_id: str, *, challenge_token: str | None = None, deadline: float | None = None
    ) -> PurchaseOutcome:
        """One attempt to buy. Safe to repeat: a buyer has one unit at most."""
        request = {"sku": sku, "qty": 1, "challengeToken": challenge_token}
        body = self._post("/api/v1/purchases", request, True, deadline, X_User_Id=user_id)
        if body["success"]:
            return {"outcome": "PURCHASED", "purchase": body["data"]}
        code = body["error"]["code"]
        if code == "ALREADY_PURCHASED":
            return {"outcome": code, "purchase": self.purchase(sku, user_id, deadline=deadline)}
        if code in ("SOLD_OUT", "SALE_NOT_ACTIVE", "CHALLENGE_REQUIRED"):
            return {"outcome": code}
        raise class_of(code)(code, body["error"]["message"], status=200)

    def events(self, sku: str | None = None, *, last_event_id: str = "", silence: float = SILENCE) -> Iterator[SaleEvent]:
        """The events of a sale until the caller leaves the loop; resumed after the last one wherever the stream breaks."""
        for event in events(self._transport, "/api/v1/sales/events", {"sku": sku}, last_event_id, silence):
            yield cast(SaleEvent, {"type": event.type, "id": event.id, "data": json.loads(event.data)})


def _segment(text: str) -> str:
    return quote(text, safe="")


def _slot_path(event_id: str) -> str:
    """`bulk`, `forecast` and `windows` are routes, so an event of that name is asked for as `%62ulk`."""
    reserved = event_id in ("bulk", "forecast", "windows")
    return "/api/v1/slots/" + (f"%{ord(event_id[0]):x}{event_id[1:]}" if reserved else _segment(event_id))


def _json(data: bytes) -> Any:
    return json.loads(data) if data else None


def _lines(data: bytes, count: int) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in data.splitlines() if line]
    if len(lines) != count:
        raise ValueError(f"{len(lines)} answers to {count} events")
    return lines
