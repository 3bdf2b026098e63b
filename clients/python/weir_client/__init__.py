"""A small typed client of Weir."""

from . import errors, types
from .client import WeirClient
from .errors import WeirError
from .webhook import Webhook, WebhookError, verify_webhook

__all__ = ["Webhook", "WebhookError", "WeirClient", "WeirError", "errors", "types", "verify_webhook"]
