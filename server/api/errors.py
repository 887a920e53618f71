"""The one place where an error becomes a status, headers and an OpenAI error object.

Used for refusals before the response, for unknown routes and methods, and for the event that ends a broken stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from server.errors import (
    BadRequest,
    EngineFailed,
    ModelNotFound,
    Overloaded,
    RequestTimeout,
    TooLong,
    TwinpaneError,
    Unavailable,
)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

CLIENT_GONE_STATUS = 499
"""Never sent; how logs and metrics name a call whose client went away."""


class HttpRefusal(TwinpaneError):
    """A call that is wrong as HTTP: route, method, media type, size or pace of its body."""

    def __init__(self, message: str, *, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


class NotServed(ModelNotFound):
    """An unknown model, with the names that are known."""

    def __init__(self, model: str, *, served: Sequence[str]) -> None:
        super().__init__(model)
        self.args = (f"{self} Available: {', '.join(f'`{name}`' for name in served)}.",)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireError:
    """An error as OpenAI clients read it; `extra` keys follow the four that are always there."""

    status: int
    message: str
    type: str
    code: str | None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code, **self.extra}
        return orjson.dumps({"error": error})


def wire_error(error: BaseException, *, request_id: str) -> WireError:
    """Any exception as the wire shows it. What is not ours is a 500 that tells the request id and nothing else."""
    match error:
        case TooLong():
            return WireError(
                status=400,
                message=str(error),
                type=INVALID_REQUEST,
                code=error.code,
                param=error.param,
                extra={"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context_tokens},
            )
        case BadRequest():
            return WireError(status=400, message=_text(error), type=INVALID_REQUEST, code=error.code, param=error.param)
        case ModelNotFound():
            return WireError(
                status=404, message=_text(error), type=INVALID_REQUEST, code="model_not_found", param="model"
            )
        case HttpRefusal():
            return WireError(
                status=error.status, message=_text(error), type=INVALID_REQUEST, code=error.code, headers=error.headers
            )
        case Overloaded():
            return WireError(
                status=429,
                message=_text(error),
                type="rate_limit_error",
                code="server_overloaded",
                headers=_retry_headers(error.retry_after_s),
            )
        case RequestTimeout():
            return WireError(
                status=504,
                message=_text(error),
                type=SERVER_ERROR,
                code="request_timeout",
                headers={"x-should-retry": "false"},
            )
        case Unavailable():
            headers = {} if error.code == "engine_unavailable" else _retry_headers(error.retry_after_s)
            if error.code == "engine_unavailable":
                headers["x-should-retry"] = "false"
            if error.code == "server_draining":
                headers["connection"] = "close"
            return WireError(status=503, message=_text(error), type=SERVER_ERROR, code=error.code, headers=headers)
        case EngineFailed() | _:
            return WireError(
                status=500,
                message=f"The server had an error while processing your request. (request id {request_id})",
                type=SERVER_ERROR,
                code="internal_error",
            )


def _text(error: BaseException) -> str:
    """The message, fit for JSON whatever a caller put into it."""
    return str(error).encode("utf-8", "replace").decode("utf-8")


def _retry_headers(retry_after_s: float | None) -> dict[str, str]:
    """`retry-after` in whole seconds, rounded up and at least 1, and the exact value for clients that know it."""
    headers = {"x-should-retry": "true"}
    if retry_after_s is not None and math.isfinite(retry_after_s):
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(retry_after_s * 1000)))
    return headers
