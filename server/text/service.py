"""What the other rooms use of the text room: prompts in, output streams out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from server.errors import BadRequest
from server.request import Conversation, Event, StopRules
from server.text.chat_template import RENDER_LIMIT_S, ChatTemplate
from server.text.output import TextOutput
from server.text.template_sandbox import TemplateTimeout
from server.text.tokenizer import Tokenizer

INLINE_CHARS = 4_000
"""Up to here encoding takes 1 to 2 ms on the event loop; longer texts go to a worker thread."""

INLINE_LIMIT_S = 0.02
"""What a template may take on the event loop; a slower one is started again on a worker thread."""


class TextService:
    """The tokenizer and chat template of the served model. Owner of the worker threads, which `close` ends."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, workers: int = 2) -> None:
        """template: None for a model that has no chat template, whose chats are refused."""
        self.tokenizer = tokenizer
        self._template = template
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="text")

    async def encode_chat(self, conversation: Conversation) -> tuple[int, ...]:
        """Prompt tokens of a conversation. Raises BadRequest, see `ChatTemplate.encode`."""
        template = self._template
        if template is None:
            raise BadRequest(
                "This model has no chat template. Use /v1/completions, which takes the whole prompt as text.",
                param="messages",
                code="unsupported_value",
            )
        if _chars(conversation) <= INLINE_CHARS:
            try:
                return tuple(template.encode(conversation, limit_s=INLINE_LIMIT_S))
            except BadRequest as error:
                if not isinstance(error.__cause__, TemplateTimeout):
                    raise
        return await self._in_worker(lambda: template.encode(conversation, limit_s=RENDER_LIMIT_S))

    async def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Prompt tokens of a raw prompt. Control spellings are control tokens here: the caller writes all of it.

        add_special_tokens: put the beginning-of-sequence token in front, if the model's tokenizer does so.
        """
        add_bos = add_special_tokens and self.tokenizer.adds_bos

        def encode() -> list[int]:
            return self.tokenizer.encode(text, parse_special=True, add_bos=add_bos)

        return tuple(encode()) if len(text) <= INLINE_CHARS else await self._in_worker(encode)

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
        """End the worker threads; work that runs is finished, work that waits is dropped."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def _in_worker(self, encode: Callable[[], list[int]]) -> tuple[int, ...]:
        return tuple(await asyncio.get_running_loop().run_in_executor(self._workers, encode))


def _chars(conversation: Conversation) -> int:
    """How much text a template has to render, roughly."""
    return sum(
        sum(map(len, message.texts)) + len(message.reasoning or "") + sum(len(c.arguments) for c in message.tool_calls)
        for message in conversation.messages
    )
