"""The words for one request, shared by every layer: what is asked, what comes out, how it ends.

All values are frozen. A request enters as a `GenerationRequest`, its tokens leave through one `OutputStream` per
choice, and what a client sees is the sequence of `Event`s those streams emit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from server.errors import TwinpaneError

RequestId = NewType("RequestId", str)

MAX_SEED = 2**63 - 1


class FinishReason(StrEnum):
    """Why a choice ended by itself. A cancelled or failed choice has no finish reason."""

    STOP = "stop"
    LENGTH = "length"


# --- what a conversation is ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that an earlier assistant turn made. `arguments` is the JSON text as the client sent it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. `texts` are its text parts in order; an empty tuple is a turn without content.

    role: "system", "user", "assistant" or "tool" ("developer" and "function" are mapped when parsed).
    """

    role: str
    texts: tuple[str, ...] = ()
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What the chat template renders. `template_kwargs` never overrides the messages or the generation prompt."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


# --- how tokens are chosen and when they stop ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen from logits; a pure function of (logits, seed, choice, position).

    temperature 0 is greedy, and so is anything up to 1e-5. top_k 0 keeps every token. logprobs is the number of
    alternatives to report with each sampled token, None for none at all. seed is always set here: a request without
    one got a random one at the border. Penalties follow OpenAI (presence, frequency: over the output) and Keskar et
    al., arXiv 1909.05858 (repetition: over prompt and output).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None

    @property
    def counts_tokens(self) -> bool:
        """Whether the sampler must know which tokens the prompt and the output hold."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request that does not say gets: the model's generation_config.json, or the OpenAI defaults."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """When a choice ends. `max_tokens` is already clamped to the context; `stop_token_ids` holds the end-of-sequence
    ids unless the request ignores them. Before `min_tokens` outputs, stop ids are not sampled and stop strings do not
    match."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    include_stop: bool = False


# --- what comes out -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One token as the device chose it. logprob and top (id, log-probability; best first) only where asked for.

    Log-probabilities are those of the model: log-softmax of the unscaled fp32 logits, before penalties and filters.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobEntry:
    """A sampled token with its text for the wire: the token's own bytes, and (bytes, log-probability) alternatives."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New visible text of a choice. `logprobs` belong to the tokens that this text completes, in order."""

    choice: int
    text: str
    logprobs: tuple[LogprobEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFinished:
    """A choice ended by itself. `matched` is the stop string or the stop token id (not end-of-sequence) that ended it.

    output_tokens counts every sampled token of the choice, the one that ended it included.
    """

    choice: int
    reason: FinishReason
    matched: str | int | None
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFailed:
    """A choice ended by a fault. The whole request is over: the engine cancels its other choices."""

    choice: int
    error: TwinpaneError


Event = TextDelta | ChoiceFinished | ChoiceFailed


class OutputStream(Protocol):
    """Where the tokens of one choice go. Called on the event loop, synchronously, and never blocks.

    Exactly one of these ends a stream: `push` returning a reason, `fail`, or `cancel`. Afterwards nothing is emitted.
    """

    def push(self, token: SampledToken) -> FinishReason | None:
        """Take the next token; a returned reason says that the choice is over and later tokens are not wanted."""
        ...

    def fail(self, error: TwinpaneError) -> None:
        """End the choice with an error."""
        ...

    def cancel(self) -> None:
        """End the choice in silence: nobody is listening any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixHints:
    """What the prefix cache reads of a prompt, made where the prompt was encoded: for a long one it takes a while.

    ids: its tokens, int64 [T]. turn_ends: positions at which turns of the conversation end, ascending, int64 [E]. turn:
    which turn of the conversation it asks for, from 1, and added_tokens: how many tokens it has beyond the prompt of
    the turn before. call_end_ids: tokens with which an answer ends that calls a tool.
    """

    ids: NDArray[np.int64]
    turn_ends: NDArray[np.int64]
    turn: int
    added_tokens: int
    call_end_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request that passed the border: tokens, rules, and one output stream per choice.

    prompt_tokens is never empty and every id is below the vocabulary size. arrival_s is on the engine's clock.
    cache_salt: only requests with an equal one share cached prefixes. hints: without them, the cache knows the tokens
    alone. client: whose request it is, where clients are told apart: the server's time and queue are shared between
    them. on_admitted is called once, on the event loop, when the first choice begins, with how many of the prompt's
    tokens were cached.
    """

    request_id: RequestId
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRules
    outputs: tuple[OutputStream, ...]
    arrival_s: float
    priority: int = 0
    cache_salt: str | None = None
    hints: PrefixHints | None = None
    client: Hashable = None
    on_admitted: Callable[[int], None] = lambda _cached_tokens: None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the border checks a request against. context_tokens is the smaller of the model's limit and KV memory."""

    context_tokens: int
    vocab_size: int


class EngineState(StrEnum):
    """loading -> ready -> draining -> stopped; failed from anywhere, for good."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """What `/health` and `/ready` are answered from. idle_s: seconds since the loop last finished a step, or 0 when
    there is nothing to do: it grows only while work waits and nothing moves."""

    state: EngineState
    running: int
    waiting: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that happened to a request: at_s on the engine's clock; facts are numbers and words, ready for JSON."""

    at_s: float
    what: str
    facts: Mapping[str, float | str]


class Engine(Protocol):
    """What the HTTP layer sees of the engine. Every method is synchronous, never blocks, and is called on the loop."""

    @property
    def limits(self) -> EngineLimits: ...

    def now(self) -> float:
        """The engine's monotonic clock, for GenerationRequest.arrival_s."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Accept a request, or raise BadRequest (TooLong, too many choices, an id outside the vocabulary), Overloaded
        or Unavailable, and keep no trace of it."""
        ...

    def check_room(self, *, client: Hashable = None, ahead: int = 0) -> None:
        """Raise Overloaded or Unavailable where a request of this client would be refused, as far as that is known
        before its prompt is; so many others are on their way."""
        ...

    def cancel(self, request_id: RequestId) -> None:
        """End every choice of a request in silence, in any phase. Unknown and ended ids are ignored."""
        ...

    def flush_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing is done, while anything is accepted and not over."""
        ...

    def health(self) -> EngineHealth: ...

    def timelines(self, name: str) -> Mapping[RequestId, Sequence[TimelineEvent]]:
        """What happened to a client's requests of this name, as far as it is remembered."""
        ...

    def begin_drain(self) -> None:
        """Refuse new requests from now on; what was accepted runs to its end."""
        ...

    async def drained(self) -> None:
        """Return when nothing accepted is left."""
        ...

    def fail_all(self, error: TwinpaneError) -> None:
        """End every request that is left with this error."""
        ...
