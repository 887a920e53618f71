"""What the other rooms use of the text room: prompts in, output streams out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, TypeVar

from server.errors import BadRequest, Unavailable
from server.request import Conversation, Event, Message, PrefixHints, StopRules, ToolCall
from server.text.budget import Abandoned, Budget
from server.text.chat_template import RENDER_LIMIT_S, ChatTemplate
from server.text.output import TextOutput
from server.text.template_sandbox import TemplateTimeout
from server.text.tokenizer import Tokenizer
from server.text.turns import TurnFinder

T = TypeVar("T")

INLINE_CHARS = 4_000
"""Up to here encoding takes 1 to 2 ms on the event loop; longer texts go to a worker thread."""

INLINE_TOKENS = 16_384
"""Up to here looking for turns takes less than a millisecond on the event loop."""

_ITEM_CHARS = 20
"""What a message, a part, a call or a value costs beside its characters, in characters."""

INLINE_LIMIT_S = 0.02
"""What a template may take on the event loop; a slower one is started again on a worker thread."""


class TextService:
    """The tokenizer and chat template of the served model. Owner of the worker threads, which `close` ends."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        context_tokens: int | None = None,
        workers: int = 2,
    ) -> None:
        """template: None for a model that has no chat template, whose chats are refused.

        context_tokens: what a prompt has to fit into. One that exceeds it by far is not encoded to its end.
        """
        self.tokenizer = tokenizer
        self._template = template
        self._turns = TurnFinder(tokenizer)
        self._context_tokens = context_tokens
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="text")
        self._budgets: set[Budget] = set()  # of what waits for a worker or runs on one

    async def encode_chat(self, conversation: Conversation) -> tuple[int, ...]:
        """Prompt tokens of a conversation. Raises BadRequest, see `ChatTemplate.encode`, and TooLong."""
        template = self._template
        if template is None:
            raise BadRequest(
                "This model has no chat template. Use /v1/completions, which takes the whole prompt as text.",
                param="messages",
                code="unsupported_value",
            )
        if not _longer_than(INLINE_CHARS, conversation):
            try:
                return tuple(template.encode(conversation, limit_s=INLINE_LIMIT_S, budget=self._budget("messages")))
            except BadRequest as error:
                if not isinstance(error.__cause__, TemplateTimeout):
                    raise
        return await self._in_worker(
            lambda budget: tuple(template.encode(conversation, limit_s=RENDER_LIMIT_S, budget=budget)), param="messages"
        )

    async def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Prompt tokens of a raw prompt. Control spellings are control tokens here: the caller writes all of it.

        add_special_tokens: put the beginning-of-sequence token in front, if the model's tokenizer does so.
        Raises TooLong. Yields to the event loop at least once, so that a call may encode many prompts.
        """
        add_bos = add_special_tokens and self.tokenizer.adds_bos

        def encode(budget: Budget) -> tuple[int, ...]:
            return tuple(self.tokenizer.encode(text, parse_special=True, add_bos=add_bos, budget=budget))

        if len(text) > INLINE_CHARS:
            return await self._in_worker(encode, param="prompt")
        tokens = encode(self._budget("prompt"))
        await asyncio.sleep(0)
        return tokens

    async def hints(self, tokens: tuple[int, ...]) -> PrefixHints:
        """What the prefix cache wants to know of an encoded prompt."""
        if len(tokens) <= INLINE_TOKENS:
            return self._turns.hints(tokens)
        return await self._in_worker(lambda budget: self._turns.hints(tokens, budget.check), param="prompt")

    def output(
        self,
        *,
        choice: int,
        stop: StopRules,
        emit: Callable[[Event], None],
        skip_special_tokens: bool = True,
        logprobs: bool = False,
    ) -> TextOutput:
        """The stream into which the engine pushes the tokens of one choice."""
        return TextOutput(
            self.tokenizer,
            choice=choice,
            stop=stop,
            emit=emit,
            skip_special_tokens=skip_special_tokens,
            logprobs=logprobs,
        )

    def close(self) -> None:
        """End the worker threads: work that waits is dropped, work that runs is given up after its current piece."""
        for budget in self._budgets:
            budget.abandon()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _budget(self, param: str) -> Budget:
        return Budget(self._context_tokens, param=param)

    async def _in_worker(self, work: Callable[[Budget], T], *, param: str) -> T:
        """Work beside the event loop. A cancelled caller ends it too."""
        budget = self._budget(param)
        self._budgets.add(budget)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._workers, work, budget)
        except Abandoned:
            raise Unavailable("The server is shutting down.", code="server_draining") from None
        finally:
            budget.abandon()
            self._budgets.discard(budget)


def _longer_than(chars: int, conversation: Conversation) -> bool:
    """Whether a template has more than that to render, roughly. Looks at no more than it takes to know."""
    waiting: list[Iterator[Any]] = [iter((conversation.messages, conversation.template_kwargs))]
    while waiting:
        for item in waiting[-1]:
            chars -= len(item) if isinstance(item, str) else 0
            chars -= _ITEM_CHARS
            if chars < 0:
                return True
            if inner := _inside(item):
                waiting.append(inner)
                break
        else:
            waiting.pop()
    return False


def _inside(item: Any) -> Iterator[Any] | None:
    if isinstance(item, Message):
        texts = (item.role, item.name, item.reasoning, item.tool_call_id)
        return chain((text for text in texts if text is not None), item.texts, item.tool_calls)
    if isinstance(item, ToolCall):
        return iter((item.id, item.name, item.arguments))
    if isinstance(item, Mapping):
        return chain.from_iterable(item.items())
    return iter(item) if isinstance(item, list | tuple) else None
