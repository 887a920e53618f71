"""The tokenizer of twinpane-tiny: a byte-level BPE learned on what the grammars write.

    python -m tools.train_tiny.tokenizer          learns it again and writes tools/train_tiny/tokenizer/

Ids are laid out as in MiMo's: all bytes and merges first, then the added tokens by MiMo's names. `<think>`, `</think>`,
`<tool_call>` and the like are added tokens that are not special, as in the vocabulary MiMo has from Qwen: a server
shows them as text unless it parses them. Digits are single tokens, and only a blank joins the word behind it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from random import Random

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from server.text.tokenizer import Tokenizer
from tools.train_tiny.conversation import TEMPLATE_PATH, Renderer, Talk
from tools.train_tiny.grammar import Draw
from tools.train_tiny.tasks import GRAMMARS, THINKING, choose

VOCAB = 1_344
FOLDER = Path(__file__).parent / "tokenizer"
CONTROL = tuple(
    f"<|{name}|>"
    for name in (
        "endoftext",
        "im_start",
        "im_end",
        "vision_start",
        "vision_end",
        "vision_pad",
        "image_pad",
        "video_pad",
    )
)
WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
MEDIA = tuple(
    f"<|{name}|>" for name in ("audio_pad", "mimo_video_start", "mimo_video_end", "mimo_audio_start", "mimo_audio_end")
)
ADDED = (*CONTROL, *WORDS, *MEDIA)
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS_CONVERSATIONS = 2_500
CORPUS_TOKENS = 384
_CHARS_PER_TOKEN = 3
_SEED = 1


def tokenizer_folder() -> Path:
    """tokenizer.json, tokenizer_config.json with the chat template, and generation_config.json, to be shipped."""
    return FOLDER


@lru_cache(maxsize=1)
def load_tokenizer() -> Tokenizer:
    return Tokenizer.from_hf_folder(FOLDER)


def learn() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(ADDED),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(corpus(), trainer)
    if backend.get_vocab_size() != VOCAB - len(ADDED):
        raise ValueError(f"the grammars' text gives only {backend.get_vocab_size()} tokens, not {VOCAB - len(ADDED)}")
    _add(backend)
    return backend


def _add(backend: tokenizers.Tokenizer) -> None:
    for words, special in ((CONTROL, True), (WORDS, False), (MEDIA, True)):
        added = [AddedToken(word, special=special, normalized=False) for word in words]
        (backend.add_special_tokens if special else backend.add_tokens)(added)


def corpus() -> Iterator[str]:
    """Conversations of the training side, as the template renders them, cut at the added tokens."""
    bare = tokenizers.Tokenizer(models.BPE())
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(use_regex=False), decoders.ByteLevel()
    _add(bare)
    renderer = Renderer(Tokenizer(bare, bos_token_id=None, adds_bos=False))
    rng = Random(_SEED)
    for _ in range(CORPUS_CONVERSATIONS):
        draw = Draw(
            rng,
            held_out=False,
            thinking=rng.random() < THINKING,
            room=CORPUS_TOKENS,
            count=lambda text: len(text) // _CHARS_PER_TOKEN,
        )
        scene = GRAMMARS[choose(rng, CORPUS_TOKENS)](draw)
        exchanges = [exchange for _, exchange in zip(range(8), scene.exchanges, strict=False)]
        talk = Talk(renderer, exchanges, system=scene.system, tools=scene.tools, thinking=draw.thinking)
        pieces = [talk.text]
        for word in ADDED:
            pieces = [part for piece in pieces for part in piece.split(word)]
        yield from filter(None, pieces)


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    backend = learn()
    backend.save(str(folder / "tokenizer.json"))
    added = backend.get_added_tokens_decoder()
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(index): {
                "content": token.content,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token.special,
            }
            for index, token in sorted(added.items())
        },
        "bos_token": None,
        "chat_template": TEMPLATE_PATH.read_text(encoding="utf-8"),
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    ids = {token.content: index for index, token in added.items()}
    generation = {
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "temperature": 0.3,
        "top_p": 0.95,
    }
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(FOLDER)
