"""What can go wrong, split by who can act on it. `server/api/errors.py` maps these to each wire format."""

from __future__ import annotations


class TwinpaneError(Exception):
    """Root of every error that has a meaning to a caller; the message is shown to that caller."""


class BadRequest(TwinpaneError):
    """The caller must change the request (HTTP 400).

    `param` is the path of the offending field (`messages[0].content[1].type`), `code` a stable machine-readable word.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class TooLong(BadRequest):
    """The prompt alone does not fit. `context_tokens` is the usable context: model limit or KV memory, the smaller."""

    def __init__(self, *, prompt_tokens: int, context_tokens: int, param: str = "messages") -> None:
        what = "messages" if param == "messages" else "prompt"
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens. However, your {what} resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the {what}.",
            param=param,
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class ModelNotFound(TwinpaneError):
    """No model of that name is served here (HTTP 404)."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model}` does not exist or you do not have access to it.")
        self.model = model


class Overloaded(TwinpaneError):
    """The queue is full (HTTP 429); the same request can succeed after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeout(TwinpaneError):
    """The request took longer than any may (HTTP 504 before the first byte, and an error event in a stream)."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The request took longer than {limit_s:g} s, the limit of this server.")


class Unavailable(TwinpaneError):
    """The server cannot take requests now (HTTP 503): `model_loading`, `server_draining` or `engine_unavailable`."""

    def __init__(self, message: str, *, code: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class EngineFailed(TwinpaneError):
    """A fault on our side while this request ran (HTTP 500). The log has the cause; the caller gets no internals."""


class StartupError(TwinpaneError):
    """The operator must change something before the server can start: one clear line, exit code 2."""
