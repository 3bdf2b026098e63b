"""The client against a real server, and against one that loses, delays and refuses."""

import contextlib
import io
import os
import re
import threading
import time
import unittest
import uuid
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from weir_client import WebhookError, WeirClient, errors, verify_webhook
from weir_client.types import SaleEvent, SlotEvent

from .harness import ADMIN_KEY, Answer, Behaviour, Server, StandIn


def event(event_id: str, config: str = "pay") -> SlotEvent:
    return {"eventId": event_id, "configName": config, "requestedTime": "2026-06-01T12:00:00Z"}


class ClientTest(unittest.TestCase):
    server: Server
    operator: WeirClient

    @classmethod
    def setUpClass(cls) -> None:
        cls.server = Server()
        cls.addClassCleanup(cls.server.stop)
        cls.operator = WeirClient(cls.server.url, admin_key=ADMIN_KEY, deadline=20)
        cls.addClassCleanup(cls.operator.close)
        bucket = {"kind": "token_bucket", "capacity": 100, "refill": 1, "period": "P1D"}
        cls.operator.call("PUT", "/admin/policies/tokens", bucket)
        cls.operator.call("PUT", "/admin/policies/jobs", {"kind": "concurrency", "limit": 1, "ttl": "PT1M"})
        config = {"configName": "pay", "maxPerWindow": 10, "windowSize": "PT4S"}
        cls.operator.call("POST", "/admin/rate-limit/config", config)

    def through(self, *behaviours: Behaviour, **options: Any) -> tuple[StandIn, WeirClient]:
        stand_in = StandIn(self.server.url, *behaviours)
        self.addCleanup(stand_in.stop)
        defaults: dict[str, Any] = {"admin_key": ADMIN_KEY, "deadline": 20}
        client = WeirClient(stand_in.url, **defaults | options)
        self.addCleanup(client.close)
        return stand_in, client

    def tenant(self, *behaviours: Behaviour) -> tuple[StandIn, WeirClient]:
        return self.through(*behaviours, admin_key=None, token=self.server.token)

    def someone(self, rate_limit: int) -> str:
        user = str(uuid.uuid4())
        self.operator.quota.configure(user, rate_limit, 60)
        return user

    def test_sends_within_a_quota_and_does_not_wait_beyond_the_deadline(self) -> None:
        user = self.someone(1)
        self.assertEqual(self.operator.quota.send(user, "hello")["status"], "QUEUED")
        began = time.monotonic()
        with self.assertRaises(errors.RateLimited) as refused:
            self.operator.quota.send(user, "again")
        self.assertLess(time.monotonic() - began, 10)
        error = refused.exception
        self.assertEqual((error.code, error.status, error.outcome_unknown), ("RATE_LIMITED", 429, False))
        self.assertGreater(error.retry_after or 0, 3_000)
        self.assertTrue(error.request_id and error.idempotency_key)
        self.operator.quota.configure(user, 2, 60, keep_count=True)
        self.assertEqual(self.operator.quota.get(user)["currentCount"], 1)
        self.operator.quota.remove(user)
        self.assertRaises(errors.NotFound, self.operator.quota.get, user)

    def test_a_key_of_the_caller_gives_the_same_message_and_refuses_another(self) -> None:
        user, key = self.someone(5), str(uuid.uuid4())
        first = self.operator.quota.send(user, "hello", idempotency_key=key)
        self.assertEqual(self.operator.quota.send(user, "hello", idempotency_key=key), first)
        with self.assertRaises(errors.IdempotencyConflict):
            self.operator.quota.send(user, "other", idempotency_key=key)

    def test_a_send_whose_answer_is_lost_is_sent_again_under_its_key_and_counts_once(self) -> None:
        for behaviour in ("lose", "hang", "cut"):
            with self.subTest(behaviour):
                user = self.someone(5)
                timeout = 1 if behaviour == "hang" else 5
                stand_in, client = self.through(behaviour, behaviour, attempt_timeout=timeout)
                client.quota.send(user, "hello")
                self.assertEqual(self.operator.quota.get(user)["currentCount"], 1)
                self.assertEqual(len(stand_in.seen), 3)
                self.assertEqual(len({(seen.headers["idempotency-key"], seen.body) for seen in stand_in.seen}), 1)
                client.quota.send(user, "hello")
                self.assertEqual(self.operator.quota.get(user)["currentCount"], 2)

    def test_waits_at_least_as_long_as_retry_after_says(self) -> None:
        for status in (429, 503):
            with self.subTest(status):
                stand_in, client = self.through(Answer(status, headers={"Retry-After": "1"}))
                client.quota.send(self.someone(5), "hello")
                first, second = stand_in.seen
                self.assertGreaterEqual(second.at - first.at, 0.99)

    def test_does_not_begin_a_wait_that_goes_beyond_the_deadline_nor_attempts_after_it(self) -> None:
        hangs = ["hang"] * 100
        stand_in, client = self.through(
            Answer(503, headers={"Retry-After": "60"}), *hangs, deadline=1, attempt_timeout=0.3
        )
        with self.assertRaises(errors.UnexpectedAnswer) as refused:
            client.quota.get("a")
        self.assertEqual((refused.exception.retry_after, len(stand_in.seen)), (60, 1))
        began = time.monotonic()
        self.assertRaises(errors.NoAnswer, client.quota.get, "a")
        self.assertLess(time.monotonic() - began, 5)
        self.assertGreaterEqual(len(stand_in.seen), 3)

    def test_what_nobody_may_repeat_is_sent_once_if_its_answer_is_lost_and_again_if_it_was_refused(self) -> None:
        key = str(uuid.uuid4())
        stand_in, client = self.through("lose", Answer(503), "lose", "lose", Answer(429))
        with self.assertRaises(errors.NoAnswer) as lost:
            client.limits.check({"policy": "tokens", "key": key, "cost": 10})
        self.assertTrue(lost.exception.outcome_unknown)
        with self.assertRaises(errors.UnexpectedAnswer):
            client.limits.check({"policy": "tokens", "key": key, "cost": 10})
        self.assertRaises(errors.NoAnswer, client.limits.hold, "tokens", key, 10)
        self.assertRaises(errors.NoAnswer, client.quota.configure, key, 1, 1)
        self.assertEqual(len(stand_in.seen), 4)
        decision = client.limits.check({"policy": "tokens", "key": key, "cost": 10})
        self.assertEqual(decision["checks"][0]["remaining"], 70)
        self.assertEqual(len(stand_in.seen), 6)

    def test_a_look_and_a_settlement_are_repeated(self) -> None:
        key = str(uuid.uuid4())
        hold = self.operator.limits.hold("tokens", key, 50)
        assert hold["holdId"] is not None
        _, client = self.through("lose")
        self.assertEqual(client.limits.settle(hold["holdId"], 20)["refunded"], 30)
        _, client = self.through("lose")
        looked = client.limits.check({"policy": "tokens", "key": key}, peek=True, explain=True)
        self.assertEqual(looked["checks"][0]["remaining"], 80)
        self.assertIn("tokens", looked["checks"][0]["explanation"])
        self.assertFalse(self.operator.limits.hold("tokens", key, 90)["allowed"])
        self.assertRaises(errors.NotFound, self.operator.limits.settle, "no-such-hold", 1)

    def test_a_permit_is_released(self) -> None:
        _, client = self.tenant()
        key = str(uuid.uuid4())
        permit = client.limits.check({"policy": "jobs", "key": key})["checks"][0]["permitId"]
        self.assertFalse(client.limits.check({"policy": "jobs", "key": key})["allowed"])
        self.assertEqual(client.limits.release(permit)["permitId"], permit)
        self.assertTrue(client.limits.check({"policy": "jobs", "key": key})["allowed"])

    def test_credentials_are_given_freshly_and_their_absence_is_named(self) -> None:
        token = mock.Mock(return_value=self.server.token)
        _, client = self.through(Answer(503), admin_key=None, token=token)
        client.limits.check({"policy": "tokens", "key": "a"}, peek=True)
        self.assertEqual(token.call_count, 2)
        with WeirClient(self.server.url) as nobody, self.assertRaises(errors.Unauthenticated):
            nobody.limits.check({"policy": "tokens", "key": "a"})

    def test_a_server_that_is_not_there_is_tried_until_the_deadline(self) -> None:
        began = time.monotonic()
        with self.assertRaises(errors.NoConnection) as refused:
            WeirClient("http://127.0.0.1:1", deadline=0.5).limits.check({"policy": "tokens", "key": "a"})
        self.assertFalse(refused.exception.outcome_unknown)
        self.assertLess(time.monotonic() - began, 5)

    def test_connections_are_used_again_but_not_those_that_the_server_has_closed(self) -> None:
        stand_in, client = self.through(Answer(200), Answer(200), Answer(200))
        client.call("GET", "/")
        client.call("GET", "/")
        self.assertEqual(len(set(map(id, stand_in.connections))), 1)
        stand_in.cut()
        client.call("POST", "/")
        self.assertEqual(len(stand_in.seen), 3)

    def test_assigns_slots_once_per_event(self) -> None:
        _, client = self.through("lose")
        name = str(uuid.uuid4())
        slot = client.slots.assign(event(name))
        self.assertEqual(slot["status"], "EXISTING")
        self.assertEqual(self.operator.slots.get(name)["scheduledTime"], slot["scheduledTime"])
        self.operator.slots.remove(name)
        self.assertRaises(errors.NotFound, self.operator.slots.assign, event(name, "unknown"))
        for odd in ("bulk", "windows", "a/b ?%c"):
            self.operator.slots.assign(event(odd))
            self.assertEqual(self.operator.slots.get(odd)["eventId"], odd)

    def test_answers_of_a_bulk_call_come_in_the_order_of_its_events(self) -> None:
        stand_in, client = self.through("lose", "cut")
        name = str(uuid.uuid4())
        numbers = range(1, 1_501)
        events = (event(f"{name}-{number}", "unknown" if number % 700 == 0 else "pay") for number in numbers)
        answers = list(client.slots.bulk(events))
        self.assertEqual([answer["eventId"] for answer in answers], [f"{name}-{number}" for number in numbers])
        failures = [(answer["line"], answer["code"]) for answer in answers if "code" in answer]
        self.assertEqual(failures, [(700, "NOT_FOUND"), (1_400, "NOT_FOUND")])
        self.assertEqual(len(stand_in.seen), 4)

    def test_a_request_is_submitted_once_and_waited_for(self) -> None:
        stand_in, client = self.tenant("lose", "lose", Answer(503))
        key = str(uuid.uuid4())
        done = client.requests.submit_and_wait("payment", {"amount": 12.5}, idempotency_key=key)
        self.assertEqual((done["status"], done["result"]), ("COMPLETED", {"amount": 12.5}))
        self.assertEqual(len({seen.body for seen in stand_in.seen if seen.method == "POST"}), 1)
        again = client.requests.submit("payment", {"amount": 12.5}, idempotency_key=key)
        self.assertEqual(again["requestId"], done["requestId"])
        with self.assertRaises(errors.IdempotencyConflict) as conflict:
            client.requests.submit("payment", {}, idempotency_key=key)
        self.assertEqual(conflict.exception.idempotency_key, key)
        self.assertRaises(errors.AlreadyFinal, client.requests.cancel, done["requestId"])

    def test_waiting_falls_back_to_asking_and_ends_in_time(self) -> None:
        state = Answer(200, {"requestId": "r", "status": "IN_PROGRESS"})
        stand_in, client = self.tenant(Answer(503, {"code": "DEPENDENCY_UNAVAILABLE"}), *[state] * 50)
        began = time.monotonic()
        with self.assertRaisesRegex(errors.NotFinal, "IN_PROGRESS"):
            client.requests.wait("r", timeout=0.7)
        self.assertGreaterEqual(time.monotonic() - began, 0.69)
        self.assertIn("?wait=", stand_in.seen[0].path)
        self.assertEqual(stand_in.seen[1].path, "/v1/requests/r")
        self.assertLess(len(stand_in.seen), 15)

    def test_a_cancellation_whose_answer_was_lost_has_cancelled(self) -> None:
        _, client = self.tenant(Answer(503), Answer(409, {"code": "ALREADY_FINAL"}), Answer(200, {"status": "CANCELLED"}))
        self.assertEqual(client.requests.cancel("r")["status"], "CANCELLED")

    def sale(self, stock: int) -> str:
        sku, start = str(uuid.uuid4()), datetime.now(UTC) + timedelta(seconds=0.3)
        times = {"startTime": start.isoformat(), "endTime": (start + timedelta(minutes=10)).isoformat()}
        product = {"sku": sku, "productName": "Shoe", "initialStock": stock} | times
        self.operator.call("POST", "/api/v1/products", product)
        next(event for event in self.operator.sales.events(sku) if event["data"].get("state") == "ACTIVE")
        return sku

    def test_a_buyer_gets_one_unit_also_when_the_answer_is_lost(self) -> None:
        sku = self.sale(2)
        _, client = self.through("lose")
        first = client.sales.attempt(sku, "a")
        self.assertEqual(first["outcome"], "ALREADY_PURCHASED")
        self.assertTrue(first["purchase"]["purchaseNo"].startswith("PUR-"))
        self.assertEqual(self.operator.sales.attempt(sku, "b")["outcome"], "PURCHASED")
        self.assertEqual(self.operator.sales.attempt(sku, "c")["outcome"], "SOLD_OUT")
        self.assertEqual(self.operator.sales.status(sku)["stock"], 0)
        self.assertRaises(errors.NotFound, self.operator.sales.purchase, sku, "c")
        self.assertRaises(errors.InvalidRequest, self.operator.sales.attempt, "", "c")

    def test_events_of_a_sale_are_resumed_where_the_stream_broke_off(self) -> None:
        sku = self.sale(3)
        stand_in, client = self.through()
        seen: list[SaleEvent] = []
        for event in client.sales.events(sku):
            seen.append(event)
            if event["type"] == "state-change":
                break
            if len(seen) == 2:
                stand_in.cut()
            self.operator.sales.attempt(sku, f"buyer {len(seen)}")
        kinds = [event["type"] for event in seen]
        self.assertEqual(kinds, ["initial", "stock-update", "stock-update", "stock-update", "state-change"])
        self.assertEqual([event["data"].get("stock") for event in seen], [3, 2, 1, 0, None])
        self.assertEqual([call.headers.get("last-event-id") for call in stand_in.seen], [None, seen[1]["id"]])

    def test_a_silent_stream_is_opened_again_and_one_that_is_refused_ends(self) -> None:
        sku = self.sale(1)
        stand_in, client = self.through(Answer(503), "hang", attempt_timeout=1)
        self.assertEqual(next(iter(client.sales.events(sku)))["type"], "initial")
        self.assertEqual(len(stand_in.seen), 3)
        self.assertRaises(errors.NotFound, next, iter(self.operator.sales.events("no-such-sku")))
        stand_in, client = self.through()
        stream = client.sales.events(sku, silence=0.2)
        next(stream)
        threading.Thread(target=next, args=(stream,), daemon=True).start()
        while len(stand_in.seen) < 3:
            time.sleep(0.02)
        self.operator.sales.attempt(sku, "a")

    def test_webhooks_of_the_server_are_verified_and_nothing_else(self) -> None:
        received: list[tuple[dict[str, str], bytes]] = []

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.append((dict(self.headers.items()), body))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        _, client = self.tenant()
        with HTTPServer(("127.0.0.1", 0), Receiver) as receiver:
            client.requests.submit("payment", "ü", callback_url=f"http://127.0.0.1:{receiver.server_port}/")
            receiver.handle_request()
        headers, body = received[0]
        secret = client.call("GET", "/v1/webhook-secret")["secret"]
        webhook = verify_webhook(secret, headers, body)
        self.assertEqual((webhook.payload["type"], webhook.payload["data"]["result"]), ("request.completed", "ü"))
        other = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
        self.assertEqual(verify_webhook(f"{other} {secret}", headers, body).id, webhook.id)
        headers = {name.lower(): value for name, value in headers.items()}
        for wrong in (
            lambda: verify_webhook(other, headers, body),
            lambda: verify_webhook(secret, headers, body + b" "),
            lambda: verify_webhook(secret, headers | {"webhook-id": "another"}, body),
            lambda: verify_webhook(secret, headers | {"webhook-signature": "v1,AAAA v2,x v1,ü"}, body),
            lambda: verify_webhook(secret, headers | {"webhook-signature": ""}, body),
            lambda: verify_webhook(secret, headers, body, now=time.time() + 360),
            lambda: verify_webhook(secret, headers, body, now=time.time() - 360),
        ):
            self.assertRaises(WebhookError, wrong)
        self.assertRaises(ValueError, verify_webhook, "whsec_", headers, body)

    def test_the_lines_of_the_readme_print_what_they_say(self) -> None:
        readme = (Path(__file__).parents[1] / "README.md").read_text()
        program = "\n".join(re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S))
        expected = re.findall(r"^ *print\(.*\)  # (.*)$", program, re.M)
        output = io.StringIO()
        environment = {"WEIR_URL": self.server.url, "WEIR_ADMIN_KEY": ADMIN_KEY, "WEIR_TOKEN": self.server.token}
        with mock.patch.dict(os.environ, environment), contextlib.redirect_stdout(output):
            exec(compile(program, "README.md", "exec"), {})
        self.assertEqual(output.getvalue().splitlines(), expected)
        self.assertGreater(len(expected), 8)


if __name__ == "__main__":
    unittest.main()
