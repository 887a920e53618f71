"""Our tokenizer against transformers' own conversion of the same GGUF files, and its promise about control tokens."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from server.errors import StartupError
from server.text.tokenizer import Tokenizer

HardTexts = Callable[[int], list[str]]


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_ten_thousand_texts_get_the_ids_of_the_reference_conversion(
    model: str, hard_texts: HardTexts, request: pytest.FixtureRequest
) -> None:
    ours: Tokenizer = request.getfixturevalue(model)
    reference = request.getfixturevalue(f"{model}_reference")
    texts = hard_texts(10_000)
    expected = reference(texts, add_special_tokens=False)["input_ids"]

    for text, ids in zip(texts, expected, strict=True):
        assert ours.encode(text, parse_special=True, add_bos=False) == ids, ascii(text)

    with_bos = reference("Hello", add_special_tokens=True)["input_ids"]
    assert ours.encode("Hello", parse_special=True, add_bos=ours.adds_bos) == with_bos
    assert ours.vocab_size == len(reference)
    decoded = reference.batch_decode(expected[:2_000])
    assert [ours.decode(ids) for ids in expected[:2_000]] == decoded


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_the_same_vocabulary_read_from_tokenizer_json_gives_the_same_ids(
    model: str, hard_texts: HardTexts, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    request.getfixturevalue(f"{model}_reference").save_pretrained(tmp_path)
    from_gguf: Tokenizer = request.getfixturevalue(model)
    from_json = Tokenizer.from_hf_folder(tmp_path)
    for text in hard_texts(1_000):
        for parse_special in (True, False):
            ids = from_gguf.encode(text, parse_special=parse_special, add_bos=False)
            if parse_special or "<start_of_image>" not in text:  # plain text to the reference, control to us
                assert from_json.encode(text, parse_special=parse_special, add_bos=False) == ids, ascii(text)
    assert (from_json.adds_bos, from_json.bos_token_id) == (from_gguf.adds_bos, from_gguf.bos_token_id)
    assert (from_json.vocab_size, from_json.stop_token_ids) == (from_gguf.vocab_size, from_gguf.stop_token_ids)
    assert [from_json.token_bytes(i) for i in range(from_gguf.vocab_size)] == [
        from_gguf.token_bytes(i) for i in range(from_gguf.vocab_size)
    ]


def test_control_spellings_in_a_text_never_become_control_ids(tokenizer: Tokenizer, hard_texts: HardTexts) -> None:
    for text in hard_texts(2_000):
        ids = tokenizer.encode(text, parse_special=False, add_bos=False)
        assert not any(tokenizer.is_special(index) for index in ids), ascii(text)
        assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(text, parse_special=True, add_bos=False))


def test_no_control_token_of_the_vocabulary_can_be_forged(tokenizer: Tokenizer) -> None:
    control = [index for index in range(tokenizer.vocab_size) if tokenizer.is_special(index)]
    for index in control:
        spelling = tokenizer.token_bytes(index).decode()
        for text in (spelling, f"a{spelling}b", spelling + spelling, f" {spelling}\n"):
            ids = tokenizer.encode(text, parse_special=False, add_bos=False)
            assert not any(map(tokenizer.is_special, ids))
            assert tokenizer.decode(ids) == text
        assert tokenizer.encode(spelling, parse_special=True, add_bos=False) == [index]


def test_texts_without_control_spellings_are_the_same_in_both_modes(
    tokenizer: Tokenizer, hard_texts: HardTexts
) -> None:
    for text in hard_texts(2_000):
        if next(tokenizer.control.matches(text), None) is None:
            parsed = tokenizer.encode(text, parse_special=True, add_bos=False)
            assert tokenizer.encode(text, parse_special=False, add_bos=False) == parsed


def test_the_bytes_of_tokens_put_together_are_the_bytes_of_the_text(
    tokenizer: Tokenizer, hard_texts: HardTexts
) -> None:
    for text in hard_texts(2_000):
        ids = tokenizer.encode(text, parse_special=False, add_bos=False)
        shown = text.replace("▁", " ") if tokenizer.adds_bos else text  # SentencePiece spells its blanks that way
        assert b"".join(map(tokenizer.token_bytes, ids)) == shown.encode()


def test_every_way_to_spell_a_byte_is_its_byte(smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    for byte in range(256):
        assert gemma3.token_bytes(238 + byte) == bytes([byte])
    single = {smollm2.token_bytes(index) for index in range(smollm2.vocab_size)}
    assert sum(len(value) == 1 for value in single) >= 200


def test_both_end_markers_of_a_vocabulary_stop_whatever_the_file_declares(
    smollm2: Tokenizer, gemma3: Tokenizer
) -> None:
    assert smollm2.stop_token_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    assert gemma3.stop_token_ids == {1, 106}  # <eos>, <end_of_turn>
    assert (smollm2.adds_bos, gemma3.adds_bos) == (False, True)


def test_ids_outside_the_vocabulary_are_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size + 5, -1]) == ""
    assert not tokenizer.is_special(tokenizer.vocab_size)


def small_folder(folder: Path, **changes: Any) -> Path:
    """A byte-level tokenizer.json whose merges and vocabulary both hold the control tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {spelling: index for index, spelling in enumerate([*alphabet, "<s", "<s>", "</", "</s", "</s>", "<|end|>"])}
    model = tokenizers.models.BPE(
        vocab=vocab,
        merges=[("<", "s"), ("<s", ">"), ("<", "/"), ("</", "s"), ("</s", ">")],
        ignore_merges=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["<think>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "additional_special_tokens": ["<|end|>"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    return folder


def test_a_folder_gives_its_special_tokens_from_all_its_files(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_hf_folder(small_folder(tmp_path, add_bos_token=True), end_token_ids={11})
    assert tokenizer.encode("<s></s><|end|><think>", parse_special=True, add_bos=True) == [257, 257, 260, 261, 262]
    assert tokenizer.stop_token_ids == {7, 9, 11, 260}
    assert tokenizer.adds_bos
    assert tokenizer.special_names == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.is_special(262), tokenizer.vocab_size) == (False, 263)


def test_added_words_that_are_not_special_are_whole_in_both_modes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_hf_folder(small_folder(tmp_path))
    less, end, more = (tokenizer.encode(text, parse_special=False, add_bos=False) for text in ("<", "|end|", ">"))
    assert tokenizer.encode("<think><|end|>", parse_special=False, add_bos=False) == [262, *less, *end, *more]


def test_lone_surrogates_are_read_as_replacement_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\ud800b\ud83d\ude00", parse_special=True, add_bos=False)
    assert tokenizer.decode(ids) == "a\ufffdb😀"


def test_merges_that_lead_to_a_control_token_do_not_forge_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_hf_folder(small_folder(tmp_path))
    random_ = random.Random(3)
    for _ in range(2_000):
        text = "".join(random_.choices(["<", "s", ">", "/", "<s>", "</s>", "<|end|>", "a", "<think>"], k=8))
        ids = tokenizer.encode(text, parse_special=False, add_bos=False)
        assert not any(map(tokenizer.is_special, ids))
        assert tokenizer.decode(ids) == text


def test_bos_is_seen_in_the_post_processor_when_the_config_is_silent(tmp_path: Path) -> None:
    folder = small_folder(tmp_path)
    assert not Tokenizer.from_hf_folder(folder).adds_bos
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 257)]
    )
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_hf_folder(folder).adds_bos


def test_a_folder_without_tokenizer_json_is_refused_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(StartupError, match=r"has no tokenizer\.json \(only tokenizer\.model"):
        Tokenizer.from_hf_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"tokenizer.ggml.model": "t5"}, "'t5' is not supported"), ({"tokenizer.ggml.pre": "x"}, "'x' is not supported")],
)
def test_an_unknown_gguf_kind_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [1]}
    with pytest.raises(StartupError, match=message):
        Tokenizer.from_gguf(metadata | changes)


def test_a_control_token_outside_the_byte_alphabet_is_still_one_token() -> None:
    tokens = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "<｜end｜>", "\n\n", "<think>"]
    types = [1] * 256 + [3, 4, 4]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [],
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("<｜end｜>\n\n<think>", parse_special=True, add_bos=False) == [256, 257, 258]
    assert tokenizer.encode("\n\n<think>", parse_special=False, add_bos=False) == [257, 258]
    assert tokenizer.decode([256, 257, 258]) == "<｜end｜>\n\n<think>"


def test_the_text_room_loads_without_torch_and_without_transformers() -> None:
    rooms = "chat_template, detokenizer, family_templates, output, service, stop_strings, tokenizer"
    code = f"import sys; from server.text import {rooms}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
