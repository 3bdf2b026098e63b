"""What a call ends with: one class per code, or group of codes that mean the same to callers."""


class WeirError(Exception):
    """Any refusal or failure. `code` is the server's, or of this client: those of the last four classes."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        status: int = 0,
        request_id: str | None = None,
        retry_after: float | None = None,
        outcome_unknown: bool = False,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status
        """0 where no answer came."""
        self.request_id = request_id
        self.retry_after = retry_after
        """Seconds until a repetition can succeed, if the server says so."""
        self.outcome_unknown = outcome_unknown
        """Whether the call may have been done all the same."""
        self.idempotency_key: str | None = None
        """Of calls that have one: with it the call can be repeated later without being done twice."""


class InvalidRequest(WeirError): ...
class Unauthenticated(WeirError): ...
class Forbidden(WeirError): ...
class NotFound(WeirError): ...
class IdempotencyConflict(WeirError): ...
class AlreadyFinal(WeirError): ...
class RateLimited(WeirError): ...
class Unavailable(WeirError): ...
class SlotsExhausted(WeirError): ...
class HoldExpired(WeirError): ...
class PermitExpired(WeirError): ...


class NoConnection(WeirError):
    """Nothing was sent."""


class NoAnswer(WeirError):
    """Something was sent, and no whole answer came in time."""


class UnexpectedAnswer(WeirError):
    """The answer is not Weir's, as from a proxy in between."""


class NotFinal(WeirError):
    """The request did not end in the time that was given."""


_CLASSES: dict[str, type[WeirError]] = {
    "INVALID_REQUEST": InvalidRequest, "VALIDATION_ERROR": InvalidRequest, "UNAUTHENTICATED": Unauthenticated,
    "UNAUTHORIZED": Unauthenticated, "UNAUTHORIZED_SCOPE": Forbidden, "FORBIDDEN": Forbidden,
    "NOT_FOUND": NotFound, "IDEMPOTENCY_PAYLOAD_CONFLICT": IdempotencyConflict, "ALREADY_FINAL": AlreadyFinal,
    "RATE_LIMITED": RateLimited, "DEPENDENCY_UNAVAILABLE": Unavailable, "SERVICE_UNAVAILABLE": Unavailable,
    "SLOTS_EXHAUSTED": SlotsExhausted, "HOLD_EXPIRED": HoldExpired, "PERMIT_EXPIRED": PermitExpired,
    "UNEXPECTED_ANSWER": UnexpectedAnswer,
}


def class_of(code: str) -> type[WeirError]:
    return _CLASSES.get(code, WeirError)
