"""What the HTTP layer is given at start: the engine, the text service, its own configuration branch."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from server.api.events import Turn
from server.config import HttpConfig
from server.metrics import Metrics
from server.request import MAX_SEED, Conversation, Engine, Event, OutputStream, PrefixHints, SamplingDefaults, StopRules


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The end-of-sequence ids."""
        ...


class Text(Protocol):
    """What the HTTP layer needs of the text service."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    async def encode_chat(self, conversation: Conversation) -> tuple[int, ...]:
        """Render and tokenize, or raise BadRequest."""
        ...

    async def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]: ...

    async def hints(self, tokens: tuple[int, ...]) -> PrefixHints:
        """What the prefix cache wants to know of an encoded prompt."""
        ...

    def output(
        self,
        *,
        choice: int,
        stop: StopRules,
        emit: Callable[[Event], None],
        skip_special_tokens: bool = True,
        logprobs: bool = False,
    ) -> OutputStream: ...


def draw_seed() -> int:
    """A seed for a request that brought none, so that its choices differ and its log line makes it reproducible."""
    return secrets.randbelow(MAX_SEED + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """Everything a route may use.

    model_names: the served names; the first is the one that responses carry. root: where the weights came from, for
    the model card. created_s: one constant Unix time for all model cards.
    """

    engine: Engine
    text: Text
    http: HttpConfig
    metrics: Metrics
    model_names: tuple[str, ...]
    root: str = ""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    system_fingerprint: str = "fp_twinpane"
    created_s: int = field(default_factory=lambda: int(time.time()))
    unix_time: Callable[[], float] = time.time
    draw_seed: Callable[[], int] = draw_seed
    turn: Turn = field(default_factory=Turn)

    def __post_init__(self) -> None:
        assert self.model_names, "a server serves at least one name"
