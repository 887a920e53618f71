"""The fields that both generation routes share: how tokens are chosen, when they stop, how they are sent.

One table each for what is honoured, what comes in a later release and is refused by name, and what is accepted without
effect. A field in none of them is accepted and named in the response header `x-ignored-params`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from server.api.fields import (
    MAX_EXACT_INTEGER,
    Field,
    Json,
    Parser,
    Table,
    array,
    at,
    boolean,
    empty_string,
    integer,
    invalid,
    json_object,
    number,
    one_of,
    read,
    string,
    too_long,
    too_many_keys,
    unsupported,
    wrong_type,
)
from server.api.limits import (
    MAX_CACHE_SALT_CHARACTERS,
    MAX_FIELDS,
    MAX_IGNORED_NAMES,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from server.errors import BadRequest, TooLong
from server.request import MAX_SEED, EngineLimits, SamplingDefaults, SamplingParams, StopRules

MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """What a request is checked against."""

    limits: EngineLimits
    defaults: SamplingDefaults
    end_token_ids: frozenset[int]
    max_choices: int
    max_logprobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The shared part of a parsed request. max_tokens None means: what the route's default is.

    seed None means that none was given; the routes draw one. ignored: names of fields that had no effect.
    """

    sampling: SamplingParams
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop_token_ids: frozenset[int]
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    cache_salt: str | None
    ignored: tuple[str, ...]

    def stop_rules(self, *, prompt_tokens: int, limits: EngineLimits, param: str, default_tokens: int) -> StopRules:
        """The rules for a prompt of this length: max_tokens cut to what the context leaves; TooLong if that is nothing.

        min_tokens is cut with it.
        """
        room = limits.context_tokens - prompt_tokens
        if room <= 0:
            raise TooLong(prompt_tokens=prompt_tokens, context_tokens=limits.context_tokens, param=param)
        wanted = default_tokens if self.max_tokens is None else self.max_tokens
        max_tokens = min(wanted, room)
        return StopRules(
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            stop_token_ids=self.stop_token_ids,
            stop=self.stop,
            include_stop=self.include_stop,
        )


def parse_generation(body: Mapping[str, Json], *, border: Border, logprobs: int | None) -> Generation:
    """The shared fields of a request; `logprobs` was read by the route, which knows its shape."""
    values = read(shared_fields(border), body)
    options = _stream_options(body, stream=values["stream"])
    max_tokens = values["max_tokens"]
    if values["max_completion_tokens"] is not None:
        max_tokens = values["max_completion_tokens"]
    if max_tokens is not None and values["min_tokens"] > max_tokens:
        invalid(
            "min_tokens",
            f"Invalid 'min_tokens': expected a value <= max_tokens ({max_tokens}), but got {values['min_tokens']} "
            "instead.",
        )
    end_ids = frozenset[int]() if values["ignore_eos"] else border.end_token_ids
    vocab_size = border.limits.vocab_size
    top_k = max(values["top_k"], 0)
    return Generation(
        sampling=SamplingParams(
            temperature=values["temperature"],
            top_k=top_k if top_k < vocab_size else 0,
            top_p=values["top_p"],
            min_p=values["min_p"],
            repetition_penalty=values["repetition_penalty"],
            presence_penalty=values["presence_penalty"],
            frequency_penalty=values["frequency_penalty"],
            logit_bias=values["logit_bias"],
            logprobs=logprobs,
        ),
        seed=None if values["seed"] is None else values["seed"] & MAX_SEED,
        max_tokens=max_tokens,
        min_tokens=values["min_tokens"],
        stop_token_ids=end_ids | frozenset(values["stop_token_ids"]),
        stop=values["stop"],
        include_stop=values["include_stop_str_in_output"],
        skip_special_tokens=values["skip_special_tokens"],
        n=values["n"],
        stream=values["stream"],
        include_usage=options["include_usage"],
        continuous_usage=options["continuous_usage_stats"],
        priority=values["priority"] + SERVICE_TIERS[values["service_tier"]],
        cache_salt=values["cache_salt"],
        ignored=(),
    )


SERVICE_TIERS = {"auto": 0, "default": 0, "flex": 1, "scale": 0, "priority": -1}
"""OpenAI's, and the steps of `priority` that they stand for here."""


@lru_cache(maxsize=8)
def shared_fields(border: Border) -> Table:
    """What is honoured, with its range. temperature 0 is greedy and 2 the most, as at OpenAI; top_k -1 and 0 keep every
    token; a negative seed is taken modulo 2**63."""
    vocab_size = border.limits.vocab_size
    token_id = integer(minimum=0, maximum=vocab_size - 1)
    defaults = border.defaults
    return {
        "temperature": Field(number(minimum=0, maximum=2), defaults.temperature),
        "top_p": Field(number(above=0, maximum=1), defaults.top_p),
        "top_k": Field(integer(minimum=-1), defaults.top_k),
        "min_p": Field(number(minimum=0, maximum=1), defaults.min_p),
        "repetition_penalty": Field(number(minimum=0.01, maximum=100), defaults.repetition_penalty),
        "presence_penalty": Field(number(minimum=-2, maximum=2), 0.0),
        "frequency_penalty": Field(number(minimum=-2, maximum=2), 0.0),
        "logit_bias": Field(_logit_bias(vocab_size), ()),
        "seed": Field(integer(minimum=-MAX_EXACT_INTEGER - 1, maximum=MAX_EXACT_INTEGER)),
        "n": Field(integer(minimum=1, maximum=border.max_choices), 1),
        "max_tokens": Field(integer(minimum=1)),
        "max_completion_tokens": Field(integer(minimum=1)),
        "min_tokens": Field(integer(minimum=0), 0),
        "stop": Field(stop_strings, ()),
        "stop_token_ids": Field(array(token_id, of="token ids", maximum=MAX_STOP_TOKEN_IDS), ()),
        "include_stop_str_in_output": Field(boolean, False),
        "ignore_eos": Field(boolean, False),
        "stream": Field(boolean, False),
        "service_tier": Field(one_of(*SERVICE_TIERS), "auto"),
        "priority": Field(integer(minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY), 0),
        "cache_salt": Field(_cache_salt),
        "skip_special_tokens": Field(boolean, True),
    }


WITHOUT_EFFECT = frozenset(
    {
        "user", "metadata", "store", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "request_id",
    }
)  # fmt: skip
"""Bookkeeping between a client and OpenAI: nothing about the answer depends on them here."""


# --- what comes in a later release --------------------------------------------------------------------------------


def _given(value: Json) -> bool:
    return value not in (None, False, "", [], {})


LATER = frozenset(
    {
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "json_schema", "regex",
        "ebnf", "grammar", "structural_tag", "prompt_logprobs", "return_token_ids", "return_prompt_text",
        "use_beam_search", "bad_words", "allowed_token_ids", "logits_processors", "truncate_prompt_tokens",
        "lora", "kv_transfer_params",
    }
)  # fmt: skip
"""Fields that would change the answer. Dropping them in silence would be a wrong answer."""


def refuse_later(body: Mapping[str, Json], later: frozenset[str] = LATER) -> None:
    for name, value in body.items():
        if name in later and _given(value):
            unsupported(name, f"Unsupported parameter: '{name}' is not supported by this server.")


def response_format(value: Json, path: str) -> None:
    kind = string(json_object(value, path).get("type"), at(path, "type"))
    if kind != "text":
        unsupported(
            at(path, "type"),
            f"Invalid value: '{kind[:64]}'. This server supports 'text' only for 'response_format.type'.",
        )


def unknown_names(body: Mapping[str, Json], *tables: Collection[str]) -> tuple[str, ...]:
    """The first fields that no table knows, in the client's order."""
    known = {"model", "stream_options"} | WITHOUT_EFFECT | LATER
    unknown = (name for name in body if name not in known and not any(name in table for table in tables))
    return tuple(islice(unknown, MAX_IGNORED_NAMES))


# --- single fields ------------------------------------------------------------------------------------------------


def stop_strings(value: Json, path: str) -> tuple[str, ...]:
    """A string or an array of strings. An empty one would match before the first token."""
    if isinstance(value, str):
        return (_stop_string(value, path),)
    if not isinstance(value, list):
        wrong_type(path, "a string or an array of strings", value)
    return array(_stop_string, of="strings", maximum=MAX_STOP_STRINGS)(value, path)


def _stop_string(value: Json, path: str) -> str:
    text = string(value, path)
    if not text:
        empty_string(path)
    if len(text) > MAX_STOP_CHARACTERS:
        invalid(
            path,
            f"Invalid '{path}': string too long. Expected a string with maximum length {MAX_STOP_CHARACTERS}, but got "
            f"a string with length {len(text)} instead.",
        )
    return text


def _cache_salt(value: Json, path: str) -> str:
    salt = string(value, path)
    if not salt:
        empty_string(path)
    if len(salt) > MAX_CACHE_SALT_CHARACTERS:
        too_long(path, MAX_CACHE_SALT_CHARACTERS)
    return salt


def _logit_bias(vocab_size: int) -> Parser[tuple[tuple[int, float], ...]]:
    bias = number(minimum=-100, maximum=100)

    def parse(value: Json, path: str) -> tuple[tuple[int, float], ...]:
        by_id: dict[int, float] = {}
        biases = json_object(value, path)
        if len(biases) > MAX_LOGIT_BIAS:
            too_many_keys(path, len(biases), MAX_LOGIT_BIAS)
        for key, entry in biases.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
                invalid(
                    at(path, key[:64]),
                    f"Invalid key in '{path}': expected a token id from 0 to {vocab_size - 1} as a string, but got "
                    f"'{key[:64]}' instead.",
                )
            by_id[int(key)] = bias(entry, at(path, key))
        return tuple(sorted(by_id.items()))

    return parse


_STREAM_OPTIONS: Table = {
    "include_usage": Field(boolean, False),
    "continuous_usage_stats": Field(boolean, False),
    "include_obfuscation": Field(boolean, False),
}


def _stream_options(body: Mapping[str, Json], *, stream: bool) -> dict[str, Any]:
    value = body.get("stream_options")
    if value is None:
        return read(_STREAM_OPTIONS, {})
    options = read(_STREAM_OPTIONS, json_object(value, "stream_options"), "stream_options")
    if not stream:
        raise BadRequest(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.", param="stream_options"
        )
    return options


def model_name(body: Mapping[str, Json]) -> str:
    if len(body) > MAX_FIELDS:
        raise BadRequest(f"Too many fields: a request may have {MAX_FIELDS}, but got {len(body)}.")
    name: str = read({"model": Field(string, required=True)}, body)["model"]
    return name
