"""The body of POST /v1/completions to a typed request: text or token ids in, one or many prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from server.api.fields import (
    Field,
    Json,
    Parser,
    Table,
    array,
    boolean,
    elements,
    empty_array,
    empty_string,
    integer,
    invalid,
    kind_of,
    read,
    string,
    too_many,
    unsupported,
    wrong_type,
)
from server.api.limits import MAX_PROMPTS, MAX_TOTAL_CHOICES
from server.api.parse_sampling import (
    Border,
    Generation,
    parse_generation,
    refuse_later,
    response_format,
    shared_fields,
    unknown_names,
)
from server.errors import TooLong
from server.request import EngineLimits

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """`prompts` is never empty; each is text, or token ids below the vocabulary size."""

    prompts: tuple[Prompt, ...]
    echo: bool
    add_special_tokens: bool
    generation: Generation


def parse_completion(body: Mapping[str, Json], *, border: Border) -> CompletionRequest:
    table = _completion(border)
    fields = read(table, body)
    refuse_later(body)
    logprobs, echo, prompts = fields["logprobs"], fields["echo"], fields["prompt"]
    if echo and logprobs is not None:
        unsupported("echo", "Unsupported parameter: 'echo' is not supported together with 'logprobs'.")
    if echo and not all(isinstance(prompt, str) for prompt in prompts):
        unsupported("echo", "Unsupported parameter: 'echo' is supported for prompts of text only.")
    generation = parse_generation(body, border=border, logprobs=logprobs)
    if fields["best_of"] is not None:
        _check_best_of(fields["best_of"], generation.n)
    if len(prompts) * generation.n > MAX_TOTAL_CHOICES:
        invalid("n", f"Invalid 'n': at most {MAX_TOTAL_CHOICES} choices are possible over all prompts of a request.")
    return CompletionRequest(
        prompts=prompts,
        echo=echo,
        add_special_tokens=fields["add_special_tokens"],
        generation=replace(generation, ignored=unknown_names(body, table, shared_fields(border))),
    )


@lru_cache(maxsize=8)
def _completion(border: Border) -> Table:
    return {
        "prompt": Field(_prompts(border.limits), required=True),
        "logprobs": Field(integer(minimum=0, maximum=border.max_logprobs)),
        "echo": Field(boolean, False),
        "suffix": Field(_no_suffix),
        "best_of": Field(integer(minimum=1)),
        "add_special_tokens": Field(boolean, True),
        "response_format": Field(response_format),
    }


def _prompts(limits: EngineLimits) -> Parser[tuple[Prompt, ...]]:
    token_id = integer(minimum=0, maximum=limits.vocab_size - 1)
    checked = array(token_id, of="token ids", minimum=1)

    def tokens(value: list[Json], path: str) -> tuple[int, ...]:
        """Length first: looking at millions of ids that can never fit would hold up everybody."""
        if len(value) >= limits.context_tokens:
            raise TooLong(prompt_tokens=len(value), context_tokens=limits.context_tokens, param=path)
        if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < limits.vocab_size:
            return tuple(value)
        return checked(value, path)

    def entry(value: Json, path: str) -> Prompt:
        if isinstance(value, str):
            return _text(value, path)
        if isinstance(value, list):
            return tokens(value, path)
        wrong_type(path, "a string or an array of token ids", value)

    def parse(value: Json, path: str) -> tuple[Prompt, ...]:
        if isinstance(value, str):
            return (_text(value, path),)
        if not isinstance(value, list):
            wrong_type(path, "a string, an array of strings or an array of token ids", value)
        if not value:
            empty_array(path)
        if kind_of(value[0]) in ("an integer", "a decimal number"):
            return (tokens(value, path),)
        if len(value) > MAX_PROMPTS:
            too_many(path, len(value), MAX_PROMPTS)
        return elements(entry, value, path)

    return parse


def _text(value: str, path: str) -> str:
    """An empty text is refused: whether it gives any token at all depends on the tokenizer."""
    if not value:
        empty_string(path)
    return value


def _no_suffix(value: Json, path: str) -> None:
    if string(value, path):
        unsupported(path, "Unsupported parameter: 'suffix' is not supported by this server.")


def _check_best_of(best_of: int, n: int) -> None:
    if best_of < n:
        invalid("best_of", f"Invalid 'best_of': expected a value >= n ({n}), but got {best_of} instead.")
    if best_of > n:
        unsupported("best_of", "Unsupported value: 'best_of' above 'n' is not supported by this server.")
