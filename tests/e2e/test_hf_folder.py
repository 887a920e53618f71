"""Folders as the hub has them, served as a process: the text is what the reference implementation makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
from transformers import GenerationConfig

from tests.model.dense_reference import mimo_logits
from tests.model.folders import (
    XIAOMI_CONFIG,
    write_companions,
    write_mimo_flash,
    write_tokenizer,
    write_xiaomi,
)
from tests.processes import Served, serving

QUESTION = "What must a redistribution retain? Say all of it, in the order of the text."
CHAT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
PROMPT = "You may reproduce and distribute copies of the Work or Derivative Works thereof in any medium"
OUTPUTS = 24
NAMED = ("--served-model-name", "m")


@dataclass
class Model:
    folder: Path
    tokenizer: tokenizers.Tokenizer
    greedy: dict[str, list[int]]
    """prompt -> the OUTPUTS tokens of the oracle"""

    def text(self, prompt: str, count: int) -> str:
        return str(self.tokenizer.decode(self.greedy[prompt][:count], skip_special_tokens=True))

    def whole(self, prompt: str) -> int:
        """The most tokens that do not end within a character: what is begun at the length limit is not shown."""
        return next(count for count in range(OUTPUTS, 12, -1) if not self.text(prompt, count).endswith("\ufffd"))


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """In transformers' names; the generation config recommends greedy sampling and an end that the chat meets."""
    folder = tmp_path_factory.mktemp("flash")
    oracle, tokenizer = write_mimo_flash(folder), write_tokenizer(folder)
    settings = GenerationConfig(max_new_tokens=OUTPUTS, do_sample=False, eos_token_id=None, pad_token_id=0)
    greedy = {}
    for prompt in (CHAT, PROMPT):
        tokens = torch.tensor([tokenizer.encode(prompt).ids])
        assert tokens.shape[1] > 2 * 17, "two windows at least"
        answer = oracle.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)
        greedy[prompt] = answer[0, tokens.shape[1] :].tolist()
    write_companions(folder, top_k=1, eos_token_id=[2, greedy[CHAT][end_of(greedy[CHAT])]])
    return Model(folder, tokenizer, greedy)


def end_of(tokens: list[int]) -> int:
    """A position, not the first ones, whose token did not occur before."""
    return next(at for at in range(4, len(tokens)) if tokens[at] not in tokens[:at])


@pytest.fixture(scope="module")
def flash_server(flash: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(flash.folder, log, *NAMED, "--long-prefill-token-threshold", "16") as served:
        yield served
        assert served.stop() == 0, served.output()
        assert "Traceback" not in served.output()


def ask(served: Served, path: str, **body: Any) -> Any:
    request = {"model": "m", "max_tokens": OUTPUTS, **body}
    response = httpx.post(f"{served.url}/v1/{path}", json=request, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def chat(served: Served, **body: Any) -> Any:
    return ask(served, "chat/completions", messages=[{"role": "user", "content": QUESTION}], **body)


def complete(served: Served, **body: Any) -> Any:
    return ask(served, "completions", prompt=PROMPT, **body)


def test_chat_and_completion_say_what_transformers_says(flash: Model, flash_server: Served) -> None:
    settings = {"temperature": 0, "ignore_eos": True, "skip_special_tokens": True}
    count = flash.whole(CHAT)
    answer = chat(flash_server, max_tokens=count, **settings)
    assert answer["choices"][0]["message"]["content"] == flash.text(CHAT, count)
    assert answer["usage"]["prompt_tokens"] == len(flash.tokenizer.encode(CHAT).ids)
    count = flash.whole(PROMPT)
    answer = complete(flash_server, max_tokens=count, **settings)
    assert answer["choices"][0]["text"] == flash.text(PROMPT, count)
    assert answer["usage"]["prompt_tokens"] == len(flash.tokenizer.encode(PROMPT).ids)


def test_what_the_folder_recommends_is_the_default(flash: Model, flash_server: Served) -> None:
    """top_k 1 leaves one token, whatever the temperature and the seed."""
    in_chat, in_text = flash.whole(CHAT), flash.whole(PROMPT)
    for seed in (1, 2):
        settings = {"temperature": 1, "seed": seed, "ignore_eos": True}
        said = chat(flash_server, max_tokens=in_chat, **settings)["choices"][0]["message"]["content"]
        assert said == flash.text(CHAT, in_chat)
        said = complete(flash_server, max_tokens=in_text, **settings)["choices"][0]["text"]
        assert said == flash.text(PROMPT, in_text)
        own = complete(flash_server, max_tokens=in_text, **settings, top_k=-1)["choices"][0]["text"]
        assert own != said, "a request's own word wins"
    assert "top_k 1" in flash_server.output()


def test_an_end_id_of_the_folder_ends_the_text(flash: Model, flash_server: Served) -> None:
    end = end_of(flash.greedy[CHAT])
    answer = chat(flash_server, temperature=0)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"] == flash.text(CHAT, end)
    assert answer["usage"]["completion_tokens"] == end + 1


def test_recommendations_turned_off_and_a_tokenizer_from_elsewhere(
    flash: Model, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """End ids are the model's own even then: they are no matter of taste, nor of the tokenizer."""
    elsewhere = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(elsewhere)
    flags = (*NAMED, "--generation-config", "none", "--tokenizer", str(elsewhere / "tokenizer.json"))
    with serving(flash.folder, tmp_path / "log", *flags) as served:
        settings = {"temperature": 1, "ignore_eos": True}
        count = flash.whole(PROMPT)
        texts = {complete(served, seed=seed, max_tokens=count, **settings)["choices"][0]["text"] for seed in (1, 2)}
        assert len(texts) == 2
        assert flash.text(PROMPT, count) not in texts
        answer = chat(served, temperature=0)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == end_of(flash.greedy[CHAT]) + 1
        assert served.stop() == 0


def test_a_folder_in_xiaomis_names_says_what_its_description_says(tmp_path: Path) -> None:
    """With MTP layers, a template in the list form of old configs, and no generation config."""
    folder = tmp_path / "xiaomi"
    folder.mkdir()
    tensors, tokenizer = write_xiaomi(folder), write_tokenizer(folder)
    write_companions(folder, jinja=False)
    (folder / "generation_config.json").unlink()
    with serving(folder, tmp_path / "log", *NAMED) as served:
        settings = {"temperature": 0, "ignore_eos": True, "max_tokens": 8, "skip_special_tokens": False}
        said = chat(served, **settings)["choices"][0]["message"]["content"]
        completed = complete(served, **settings)["choices"][0]["text"]
        assert served.stop() == 0
    for prompt, text in ((CHAT, said), (PROMPT, completed)):
        tokens = tokenizer.encode(prompt).ids
        start = len(tokens)
        for _ in range(8):
            tokens.append(int(mimo_logits(XIAOMI_CONFIG, tensors, torch.tensor(tokens), 17)[-1].argmax()))
        expected = tokenizer.decode(tokens[start:], skip_special_tokens=False)
        assert len(expected.rstrip("\ufffd")) > 3
        assert text.rstrip("\ufffd") == expected.rstrip("\ufffd"), "what is begun at the length limit is not shown"
