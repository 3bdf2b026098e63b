"""Verifies webhooks, signed as Standard Webhooks says."""

import base64
import binascii
import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any


class WebhookError(Exception):
    """The webhook is not from the server, or too old. Answer 401 and do not look at the body."""


@dataclass(frozen=True)
class Webhook:
    id: str
    """The same each time a webhook is sent: tells repetitions."""
    sent_at: datetime
    payload: Any


def verify_webhook(
    secret: str, headers: Mapping[str, str], body: bytes, *, tolerance: float = 300, now: float | None = None
) -> Webhook:
    """`secret` is `whsec_…`; several, separated by spaces, while they are rotated. `body` is the body byte for byte."""
    present = {name.lower(): value for name, value in headers.items()}
    for name in ("webhook-id", "webhook-timestamp", "webhook-signature"):
        if not present.get(name):
            raise WebhookError(f"the header {name} is missing")
    id, timestamp = present["webhook-id"], present["webhook-timestamp"]
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):
        raise WebhookError("webhook-timestamp is not a time")
    if abs((time.time() if now is None else now) - int(timestamp)) > tolerance:
        raise WebhookError("webhook-timestamp is not of this time")
    signed = f"{id}.{timestamp}.".encode() + body
    right = False
    for text in secret.split():
        mac = hmac.digest(_key(text), signed, hashlib.sha256)
        expected = b"v1," + base64.b64encode(mac)
        for signature in present["webhook-signature"].split(" "):
            right |= hmac.compare_digest(expected, signature.encode())
    if not right:
        raise WebhookError("no signature is right")
    return Webhook(id, datetime.fromtimestamp(int(timestamp), UTC), json.loads(body))


def _key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except binascii.Error:
        key = b""
    if not key:
        raise ValueError('a webhook secret is "whsec_" and base64')
    return key
