"""Text to token ids and back, for one model. Control tokens come only from text that is trusted to hold them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from server.errors import StartupError
from server.text.budget import Budget
from server.text.control_spellings import ControlSpellings
from server.text.cuts import Cuts
from server.text.gguf_tokenizer import read_gguf_vocabulary
from server.text.token_bytes import byte_level_bytes, sentencepiece_bytes

END_MARKERS = frozenset(
    {
        "<|endoftext|>",
        "<|im_end|>",
        "<end_of_turn>",
        "<eos>",
        "</s>",
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|return|>",
        "<|call|>",
    }
)
"""Control tokens that end a turn by their name: model configs often declare only one of those a model uses."""

_NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """The tokenizer of one model. Immutable after construction, so it may be used from any thread.

    Two `tokenizers` pipelines share one vocabulary: one cuts control tokens out of a text, the other is blind to them.
    Added tokens that are not special (`<think>` in many vocabularies) are words, not control tokens.

    Decoding is by bytes: the text of ids is the UTF-8 reading of their bytes put together, with U+FFFD for what is no
    UTF-8. It treats the ids as a piece of a text, so no leading blank is taken away.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        adds_bos: bool,
        end_token_ids: Iterable[int] = (),
        special_names: Mapping[str, str] | None = None,
    ) -> None:
        """`backend` must be a BPE with its special tokens added; special_names: bos_token and so on, for templates.

        Raises StartupError if the model is no BPE or its tokens are spelled in a way we do not know.
        """
        if not isinstance(backend.model, tokenizers.models.BPE):
            raise StartupError(f"Tokenizer model {type(backend.model).__name__} is not supported; supported: BPE.")
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._special = {index: token.content for index, token in added.items() if token.special}
        self._control_ids = {spelling: index for index, spelling in self._special.items()}
        self._whole = backend
        self._blind = _blind_to_control(backend, added)
        self._bytes = _bytes_by_id(backend, added)
        unknown = backend.model.unk_token  # what the model writes for characters it cannot spell
        self._forgeable = frozenset(index for index, spelling in self._special.items() if spelling != unknown)

        self.vocab_size = len(self._bytes)
        """One more than the largest id."""
        self.bos_token_id = bos_token_id
        self.adds_bos = adds_bos and bos_token_id is not None
        self.control = ControlSpellings(self._control_ids)
        self._cuts = Cuts([self._encode_plain, lambda text: self._run(self._whole, text)], self._bytes, self.control)
        self._most_chars = _most_chars(backend, added.values(), self._bytes)
        self.stop_token_ids = frozenset(end_token_ids) | {
            index for spelling, index in self._control_ids.items() if spelling in END_MARKERS
        }
        self.special_names = dict(special_names or {})
        """How a chat template knows the special tokens: bos_token, eos_token, unk_token, pad_token."""

    @classmethod
    def from_hf_folder(cls, folder: Path, *, end_token_ids: Iterable[int] = ()) -> Tokenizer:
        """Read tokenizer.json and its companions; end_token_ids are added to those of generation_config.json.

        Raises StartupError if there is no tokenizer.json, or it cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).is_file()]
            found = f"only {', '.join(others)}, which cannot be used alone" if others else "no tokenizer at all"
            raise StartupError(f"{folder} has no tokenizer.json ({found}). Convert the tokenizer to tokenizer.json.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise StartupError(f"{path} cannot be read as a tokenizer: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        names = {name: spelling for name in _NAMED_SPECIALS if (spelling := _spelling(config.get(name)))}
        _declare_special(backend, config, names)

        bos = backend.token_to_id(names["bos_token"]) if "bos_token" in names else None
        adds_bos = config.get("add_bos_token")
        if adds_bos is None:
            adds_bos = bos is not None and backend.encode("a").ids[:1] == [bos]
        ends = set(end_token_ids)
        if "eos_token" in names and (eos := backend.token_to_id(names["eos_token"])) is not None:
            ends.add(eos)
        for file in ("config.json", "generation_config.json"):
            ends |= _ids(_read_json(folder / file).get("eos_token_id"))
        return cls(backend, bos_token_id=bos, adds_bos=bool(adds_bos), end_token_ids=ends, special_names=names)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, end_token_ids: Iterable[int] = ()) -> Tokenizer:
        """Build from a GGUF file's key -> value table. Raises StartupError for a kind we do not know."""
        vocabulary = read_gguf_vocabulary(metadata)
        tokens = metadata["tokenizer.ggml.tokens"]
        keys = zip(_NAMED_SPECIALS, ("bos", "eos", "unknown", "padding"), strict=True)
        ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys}
        return cls(
            vocabulary.backend,
            bos_token_id=vocabulary.bos_token_id,
            adds_bos=vocabulary.adds_bos,
            end_token_ids={*vocabulary.end_token_ids, *end_token_ids},
            special_names={name: tokens[index] for name, index in ids.items() if index is not None},
        )

    def encode(self, text: str, *, parse_special: bool, add_bos: bool, budget: Budget | None = None) -> list[int]:
        """Token ids of a text; add_bos puts the beginning-of-sequence id in front, where the model has one.

        With parse_special the spelling of a control token is that token; without it, it is text like any other and no
        control id comes out, whatever the text. Lone surrogates, which are no text, are read as U+FFFD.

        A long text is encoded in pieces, and its budget is asked after each: raises TooLong and Abandoned. The ids are
        those of the whole, except where it goes on for `cuts.LONGEST_PIECE_CHARS` characters without words or lines.
        """
        ids = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        budget = budget or Budget()
        budget.foresee(self.least_tokens(len(text)))
        for piece in self._cuts.pieces(text):
            budget.foresee(self.least_tokens(len(piece)))
            found = self._run(self._whole, piece) if parse_special else self._encode_plain(piece)
            budget.spend(len(found))
            ids += found
        return ids

    def least_tokens(self, chars: int) -> int:
        """A text of that many characters has at least so many tokens; 0 where the vocabulary allows no such bound."""
        return chars // self._most_chars if self._most_chars else 0

    def encode_control(self, spelling: str) -> int:
        """The id of a control token. Raises KeyError if there is none of that spelling."""
        return self._control_ids[spelling]

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ids; control tokens are spelled out unless skipped."""
        kept = (i for i in ids if not (skip_special and i in self._special))
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; nothing for an id that only pads the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token, which belongs to the format of a conversation and not to its text."""
        return token_id in self._special

    def _encode_plain(self, text: str) -> list[int]:
        ids = self._run(self._blind, text)
        if self._forgeable.isdisjoint(ids):
            return ids
        # Merges (or a whole-word look-up) put a control token together from its characters: no piece may hold them all.
        cuts = [0, *(start + 1 for start in self.control.starts(text)), len(text)]
        pieces = [text[start:stop] for start, stop in pairwise(cuts)]
        return [index for piece in pieces for index in self._run(self._blind, piece)]

    @staticmethod
    def _run(pipeline: tokenizers.Tokenizer, text: str) -> list[int]:
        # The batch call lets other threads run and computes no offsets; the single one does neither.
        try:
            encoded = pipeline.encode_batch_fast([text], add_special_tokens=False)
        except TypeError:  # lone surrogates
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            encoded = pipeline.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded[0].ids
        return ids


def _blind_to_control(backend: tokenizers.Tokenizer, added: Mapping[int, AddedToken]) -> tokenizers.Tokenizer:
    """A pipeline over the same vocabulary (shared, not copied) to which control spellings are text like any other.

    Added words that are not special, like `<think>` in many vocabularies, are matched whole by both.
    """
    blind = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        blind.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        blind.pre_tokenizer = backend.pre_tokenizer
    for special, run in groupby((added[index] for index in sorted(added)), key=lambda token: token.special):
        (blind.add_special_tokens if special else blind.add_tokens)(list(run))
    if blind.get_added_tokens_decoder().keys() != added.keys():
        raise StartupError("The tokenizer's added tokens have gaps in their ids, which is not supported.")
    blind.encode_special_tokens = True
    return blind


def _most_chars(backend: tokenizers.Tokenizer, added: Iterable[AddedToken], token_bytes: Iterable[bytes]) -> int | None:
    """How many characters of a text one token can stand for; None if a token can swallow any number of them."""
    normalizer = _state_types(backend.normalizer)
    swallows = any(token.lstrip or token.rstrip for token in added)
    if swallows or not normalizer <= {"Replace", "Prepend", "Sequence"}:
        return None
    return max(map(len, token_bytes), default=0) or None


def _state_types(part: Any) -> set[str]:
    """The names of the steps that a part of a pipeline is made of."""
    if part is None:
        return set()
    state = json.loads(part.__getstate__())
    return {state["type"], *(step["type"] for step in state.get("normalizers", ()))}


def _bytes_by_id(backend: tokenizers.Tokenizer, added: Mapping[int, AddedToken]) -> list[bytes]:
    kind = str(backend.decoder)
    if "ByteLevel" in kind:
        spelled = byte_level_bytes
    elif "ByteFallback" in kind or "Metaspace" in kind:
        spelled = sentencepiece_bytes
    else:
        raise StartupError(f"Tokenizer decoder {kind or None} is not supported; supported: ByteLevel, ByteFallback.")
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for spelling, index in vocab.items():
        table[index] = spelled(spelling)
    for index, token in added.items():
        plain = spelled is byte_level_bytes or token.special
        table[index] = token.content.encode() if plain else sentencepiece_bytes(token.content)
    return table


def _declare_special(backend: tokenizers.Tokenizer, config: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Some checkpoints say only in tokenizer_config.json which tokens are special."""
    declared = [token for token in config.get("added_tokens_decoder", {}).values() if token.get("special")]
    spellings = {token["content"]: AddedToken(**token) for token in declared}
    for spelling in [*names.values(), *map(_spelling, config.get("additional_special_tokens") or ())]:
        if spelling:
            spellings.setdefault(spelling, AddedToken(spelling, special=True, normalized=False))
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [token for text, token in spellings.items() if text not in known and backend.token_to_id(text) is not None]
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartupError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _spelling(token: Any) -> str | None:
    """A special token is written as a string or as an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _ids(value: Any) -> set[int]:
    return {value} if isinstance(value, int) else set(value or ())
