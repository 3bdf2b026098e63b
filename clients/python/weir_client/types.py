"""The JSON that calls take and give, as in /openapi.json."""

from typing import Any, Literal, NotRequired, TypedDict, final

Quota = TypedDict("Quota", {
    "userId": str, "rateLimit": int, "timeWindow": int, "currentCount": int, "lastRefreshTime": str,
})
Sent = TypedDict("Sent", {
    "status": Literal["QUEUED"], "messageId": str, "userId": str, "remaining": int, "resetAt": str,
})
SlotEvent = TypedDict("SlotEvent", {"eventId": str, "configName": str, "requestedTime": str})


@final
class Slot(SlotEvent):
    windowStart: str
    scheduledTime: str
    status: Literal["NEW", "EXISTING"]


@final
class SlotFailure(TypedDict):
    """An event of a bulk call that has no slot; `line` counts the events of the call from 1."""

    line: int
    eventId: NotRequired[str]
    code: str
    message: str


Check = TypedDict("Check", {"policy": str, "key": str, "cost": NotRequired[int]})
CheckedLimit = TypedDict("CheckedLimit", {
    "policy": str, "key": str, "allowed": bool, "limit": int, "remaining": int, "retryAfterMs": int | None,
    "resetAfterMs": int, "permitId": NotRequired[str], "explanation": NotRequired[str],
})
Decision = TypedDict("Decision", {"allowed": bool, "checks": list[CheckedLimit]})
Hold = TypedDict("Hold", {
    "allowed": bool, "holdId": str | None, "remaining": int, "expiresAt": str | None, "retryAfterMs": int | None,
})
Settled = TypedDict("Settled", {
    "holdId": str, "policy": str, "key": str, "held": int, "cost": int, "refunded": int, "charged": int,
})
Released = TypedDict("Released", {"permitId": str, "policy": str, "key": str, "cost": int})
RequestStatus = Literal[
    "ACCEPTED", "PENDING_ENQUEUE", "IN_PROGRESS", "COMPLETED",
    "FAILED_PERMANENT", "FAILED_RETRY_EXHAUSTED", "CANCELLED",
]
Accepted = TypedDict("Accepted", {"requestId": str, "status": RequestStatus, "acceptedAt": str})
RequestState = TypedDict("RequestState", {
    "requestId": str, "status": RequestStatus, "failureCode": str | None, "failureMessage": str | None,
    "attempts": int, "acceptedAt": str, "updatedAt": str, "result": Any, "resultError": NotRequired[str | None],
})
Cancelled = TypedDict("Cancelled", {"requestId": str, "status": RequestStatus})
Sale = TypedDict("Sale", {
    "sku": str, "state": Literal["UPCOMING", "ACTIVE", "ENDED"], "stock": int, "initialStock": int,
    "productName": str, "startTime": str, "endTime": str, "endReason": str | None,
})
Purchase = TypedDict("Purchase", {"sku": str, "purchaseNo": str, "purchasedAt": str})
PurchaseOutcome = TypedDict("PurchaseOutcome", {
    "outcome": Literal["PURCHASED", "ALREADY_PURCHASED", "SOLD_OUT", "SALE_NOT_ACTIVE", "CHALLENGE_REQUIRED"],
    "purchase": NotRequired[Purchase],
})
"""With PURCHASED and ALREADY_PURCHASED comes the purchase that the buyer has."""
SaleEvent = TypedDict("SaleEvent", {
    "type": Literal["initial", "stock-update", "state-change"], "id": str, "data": dict[str, Any],
})
