"""The client: prompts of an exact length, and streamed answers with the time of every chunk."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from tokenizers import Tokenizer

from bench.peers import SAMPLINGS, Sampling

REQUEST_LIMIT_S = 600.0
PLAIN_WORD = re.compile(r"[Ġ▁][a-z]{3,9}")
"""A vocabulary entry that is a blank and a short word, as byte-level and SentencePiece vocabularies spell the blank."""


class RequestFailed(Exception):
    """A server answered with an error, or not at all."""


class Prompts:
    """Random texts in which every word is one token, so that words count tokens.

    No two share their first word often enough to matter, and none its first 16 tokens: a prefix cache finds nothing.
    """

    def __init__(self, tokenizer_file: Path, seed: int) -> None:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        words = sorted(token[1:] for token in tokenizer.get_vocab() if PLAIN_WORD.fullmatch(token))
        # Some entries no text leads to: the merges on the way to them are of other words.
        alone = tokenizer.encode_batch_fast([f"a {word}" for word in words], add_special_tokens=False)
        self._words = [word for word, found in zip(words, alone, strict=True) if len(found.ids) == 2]
        if not self._words:
            raise ValueError(f"{tokenizer_file}: no word of its vocabulary is one token in a text, and 200 are wanted")
        self._random = random.Random(seed)
        sample = self.of_words(200)
        counted = len(tokenizer.encode(sample, add_special_tokens=False).ids)
        if counted != 200:
            raise ValueError(f"{tokenizer_file}: 200 words of its vocabulary are {counted} tokens")

    def of_words(self, count: int) -> str:
        return "".join(f" {word}" for word in self._random.choices(self._words, k=count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Times are of time.perf_counter. stamps_s: the arrival of every chunk that carried text."""

    sent_s: float
    stamps_s: tuple[float, ...]
    ended_s: float
    output_tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None = None

    @property
    def ttft_s(self) -> float:
        return self.stamps_s[0] - self.sent_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first by the time between the first and the last chunk."""
        if self.output_tokens < 2 or self.stamps_s[-1] <= self.stamps_s[0]:
            raise RequestFailed(f"{self.output_tokens} tokens in {len(self.stamps_s)} chunk(s) give no decode rate")
        return (self.output_tokens - 1) / (self.stamps_s[-1] - self.stamps_s[0])


COUNT_TOLERANCE = 0.02
"""Share by which a server's count of a prompt may differ from ours."""


class Client:
    """One server as its users see it. Every request streams, asks for usage and asks to ignore the end of sequence.

    `overhead_tokens` is what the server adds to a prompt (a begin-of-sequence token), known after `calibrate`.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        model: str,
        prompts: Prompts,
        extra: Callable[[Sampling], dict[str, Any]] = lambda sampling: {},
    ) -> None:
        self._session = session
        self._url = f"{url}/completions"
        self._model = model
        self._prompts = prompts
        self._extra = extra
        self.overhead_tokens = 0

    def prompt(self, tokens: int) -> str:
        """A prompt that the server counts as exactly `tokens`."""
        return self._prompts.of_words(tokens - self.overhead_tokens)

    async def calibrate(self, tokens: int = 100) -> None:
        """Learn the overhead from the server's own count; raise RequestFailed if it then counts otherwise than we, but
        for two per cent: a tokenizer of its own may join two of the words."""
        self.overhead_tokens = 0
        self.overhead_tokens = await self._count(self.prompt(tokens)) - tokens
        counted = await self._count(self.prompt(2 * tokens))
        if abs(counted - 2 * tokens) > COUNT_TOLERANCE * 2 * tokens:
            raise RequestFailed(f"a prompt of {2 * tokens} tokens is counted as {counted}")

    async def ask(self, prompt: str, outputs: int, sampling: Sampling = SAMPLINGS["greedy"]) -> Answer:
        """Stream one completion of `outputs` tokens."""
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        body = self._body(prompt, outputs, sampling, streaming)
        stamps: list[float] = []
        usage: dict[str, Any] = {}
        sent_s = time.perf_counter()
        try:
            async with self._session.post(self._url, json=body) as response:
                await _refuse_errors(response)
                async for line in response.content:
                    event = _event(line)
                    if event is None:
                        continue
                    if any(choice.get("text") for choice in event.get("choices") or ()):
                        stamps.append(time.perf_counter())
                    usage = event.get("usage") or usage
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        ended_s = time.perf_counter()
        return Answer(
            sent_s=sent_s,
            stamps_s=tuple(stamps) or (ended_s,),
            ended_s=ended_s,
            output_tokens=int(usage.get("completion_tokens") or len(stamps)),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        )

    async def ask_all(self, prompts: Sequence[str], outputs: int, sampling: Sampling) -> list[Answer]:
        """All at once; the first failure ends them all."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.ask(prompt, outputs, sampling)) for prompt in prompts]
        return [task.result() for task in tasks]

    async def _count(self, prompt: str) -> int:
        body = self._body(prompt, 1, SAMPLINGS["greedy"], {})
        try:
            async with self._session.post(self._url, json=body) as response:
                await _refuse_errors(response)
                answer = orjson.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        return int(answer["usage"]["prompt_tokens"])

    def _body(self, prompt: str, outputs: int, sampling: Sampling, streaming: dict[str, Any]) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": outputs,
            "ignore_eos": True,
            **sampling.body(),
            **streaming,
            **self._extra(sampling),
        }
        return {name: value for name, value in body.items() if value is not None}


def open_session() -> aiohttp.ClientSession:
    """No limit on connections, and a long one on time. The collector does not look again at what is loaded: that would
    take time from the server."""
    gc.collect()
    gc.freeze()
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    )


async def _refuse_errors(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise RequestFailed(f"HTTP {response.status}: {(await response.text())[:200]}")


def _event(line: bytes) -> dict[str, Any] | None:
    """The JSON of an SSE data line; None for blanks, comments and the closing mark. An error event raises."""
    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
    if not data or data == b"[DONE]":
        return None
    event = orjson.loads(data)
    assert isinstance(event, dict)
    if event.get("error"):
        raise RequestFailed(f"error in the stream: {str(event['error'])[:200]}")
    return event
