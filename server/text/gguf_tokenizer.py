"""Rebuilding a `tokenizers` pipeline from the vocabulary that a GGUF file carries.

A GGUF has no tokenizer.json: it lists tokens, their types, and either merges (byte-level BPE, "gpt2") or scores
(SentencePiece, "llama"). Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from server.errors import StartupError
from server.text.token_bytes import BLANK, BYTE_OF, spell_bytes

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_BLANKS}"


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_BLANKS}"
)

_SPLITS: Mapping[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "gpt-4o": _GPT4O,
}
"""`tokenizer.ggml.pre` -> how text is split before the merges; None is GPT-2's own split.

smollm: the model was trained with every digit split off first, the conversion that is our oracle does not do that.
"""

_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})
"""Vocabularies in which a word that is a token is that token, whatever the merges say; they also begin with BOS."""

_MEDIA_MARKERS = frozenset({"<start_of_image>", "<end_of_image>", "<image_soft_token>"})
"""Listed as user-defined (plain text) in files for text models, though only the server may write them."""


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """What a GGUF says about its tokenizer. The backend's added tokens are matched whole; special ones are control."""

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    end_token_ids: frozenset[int]
    adds_bos: bool


def read_gguf_vocabulary(metadata: Mapping[str, Any]) -> GgufVocabulary:
    """Build from GGUF key -> plain Python value. Raises StartupError for a kind or pre-tokenizer we do not know."""
    model = metadata.get("tokenizer.ggml.model")
    tokens: Sequence[str] | None = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise StartupError("The GGUF file carries no vocabulary (tokenizer.ggml.tokens is missing).")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    control = _control_tokens(metadata)
    if model == "gpt2":
        backend = _byte_level(metadata, tokens, pre)
    elif model == "llama":
        backend = _sentencepiece(metadata, tokens, control)
    else:
        raise StartupError(f"GGUF tokenizer {model!r} is not supported; supported: 'gpt2' and 'llama'.")
    for special in (True, False):
        _add_whole_tokens(backend, metadata, control, special=special)

    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return GgufVocabulary(
        backend=backend,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        end_token_ids=frozenset(end for end in ends if end is not None),
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", model == "llama" or pre in _WHOLE_WORDS_FIRST)),
    )


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], pre: str) -> tokenizers.Tokenizer:
    if pre not in _SPLITS:
        raise StartupError(f"GGUF pre-tokenizer {pre!r} is not supported; supported: {', '.join(sorted(_SPLITS))}.")
    whole = {token for token, kind in _typed(metadata) if kind in (_TokenType.CONTROL, _TokenType.USER_DEFINED)}

    def spelled(token: str) -> str:
        return token if token in whole or BYTE_OF.keys() >= set(token) else spell_bytes(token.encode())

    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={spelled(token): index for index, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", ())],
            ignore_merges=pre in _WHOLE_WORDS_FIRST,
        )
    )
    split = _SPLITS[pre]
    if split is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], control: Collection[str]
) -> tokenizers.Tokenizer:
    """SentencePiece BPE with byte fallback. Gemma merges in vocabulary order, the others best score first."""
    gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    vocab = {_blanks_spelled(token): index for index, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    elif gemma:
        merges = _merges_in_order(vocab, control)
    else:
        merges = _merges_by_score(vocab, control, metadata["tokenizer.ggml.scores"])

    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id")
    unknown = None if unknown_id is None else _blanks_spelled(tokens[unknown_id])
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    if metadata.get("tokenizer.ggml.add_space_prefix", not gemma):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=BLANK, prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Replace(" ", BLANK)
    backend.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _merges_in_order(vocab: Mapping[str, int], control: Collection[str]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others: earlier tokens first, then longer left parts.

    No merge makes a control token: its spelling in a user's text has to stay text.
    """
    return [
        (left, right)
        for token in vocab
        if len(token) > 1 and token not in control
        for cut in range(len(token) - 1, 0, -1)
        if (right := token[cut:]) in vocab and (left := token[:cut]) in vocab
    ]


def _merges_by_score(
    vocab: Mapping[str, int], control: Collection[str], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """The same pairs, best score first; equal scores: longer parts first, then vocabulary order."""
    pairs = _merges_in_order(vocab, control)
    return sorted(pairs, key=lambda pair: (-scores[vocab[pair[0] + pair[1]]], -len(pair[0]), -len(pair[1])))


def _add_whole_tokens(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], control: Collection[str], *, special: bool
) -> None:
    """Register the control tokens (special) or the other user-defined ones: both are matched whole in a text."""
    whole = control if special else [t for t, kind in _typed(metadata) if kind == _TokenType.USER_DEFINED]
    added = [
        AddedToken(token, normalized=False, special=special)
        for token in whole
        if (special or token not in control) and backend.token_to_id(token) is not None
    ]
    if special:
        backend.add_special_tokens(added)
    else:
        backend.add_tokens(added)


def _control_tokens(metadata: Mapping[str, Any]) -> dict[str, None]:
    """What only the server may write, in vocabulary order: control tokens, and those that the file gives a role."""
    roles = {metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "unknown", "padding")}
    return dict.fromkeys(
        token
        for index, (token, kind) in enumerate(_typed(metadata))
        if kind == _TokenType.CONTROL or index in roles or (kind == _TokenType.USER_DEFINED and token in _MEDIA_MARKERS)
    )


def _typed(metadata: Mapping[str, Any]) -> zip[tuple[str, int]]:
    return zip(metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ()), strict=False)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _blanks_spelled(token: str) -> str:
    """Files spell a run of blanks as blanks; the vocabulary looks it up in SentencePiece's spelling."""
    return BLANK * len(token) if token and not token.strip(" ") else token
