"""A gpt-oss folder as it is published, experts in mxfp4, served as a process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
from transformers import GenerationConfig

from tests.e2e.scoring import check_bf16, log_probabilities, served_log_probabilities
from tests.model.folders import (
    HARMONY,
    HARMONY_CONTROL,
    VOCAB,
    gpt_oss_mxfp4_tensors,
    load_gpt_oss_mxfp4,
    tiny_gpt_oss,
    write_gpt_oss_mxfp4,
    write_tokenizer,
)
from tests.processes import ROOT, Served, serving

QUESTION = "What must a redistribution retain? Say all of it, in the order of the text."
CHAT = f"<|start|>user<|message|>{QUESTION}<|end|><|start|>assistant"
OUTPUTS = 24
DTYPES = (torch.float32, torch.bfloat16)
CONFIG = tiny_gpt_oss(vocab_size=VOCAB, sliding_window=16)


@dataclass
class Model:
    folder: Path
    tokenizer: tokenizers.Tokenizer
    greedy: list[int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("gpt-oss")
    write_gpt_oss_mxfp4(folder, CONFIG, gpt_oss_mxfp4_tensors(CONFIG))
    tokenizer = write_tokenizer(folder, HARMONY_CONTROL)
    (folder / "chat_template.jinja").write_text(HARMONY)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    tokens = torch.tensor([tokenizer.encode(CHAT).ids])
    assert tokens.shape[1] > 2 * 16, "two windows at least"
    settings = GenerationConfig(max_new_tokens=OUTPUTS, do_sample=False, eos_token_id=None, pad_token_id=0)
    oracle = load_gpt_oss_mxfp4(folder)
    answer = oracle.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)
    return Model(folder, tokenizer, answer[0, tokens.shape[1] :].tolist())


@pytest.fixture(scope="module")
def served(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(model.folder, log, "--served-model-name", "m", "--long-prefill-token-threshold", "16") as process:
        yield process
        assert process.stop() == 0, process.output()
        assert "Traceback" not in process.output()


def ask(served: Served, path: str, **body: Any) -> Any:
    request = {"model": "m", "max_tokens": OUTPUTS, "temperature": 0, **body}
    response = httpx.post(f"{served.url}/v1/{path}", json=request, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def chat(served: Served, **body: Any) -> Any:
    return ask(served, "chat/completions", messages=[{"role": "user", "content": QUESTION}], **body)


def test_it_says_what_transformers_says_of_the_same_folder(model: Model, served: Served) -> None:
    settings = {"ignore_eos": True, "skip_special_tokens": False}
    expected = model.tokenizer.decode(model.greedy, skip_special_tokens=False).rstrip("\ufffd")
    assert len(expected) > OUTPUTS
    answer = chat(served, **settings)
    assert answer["choices"][0]["message"]["content"].rstrip("\ufffd") == expected
    assert answer["usage"]["prompt_tokens"] == len(model.tokenizer.encode(CHAT).ids)
    answer = ask(served, "completions", prompt=model.tokenizer.encode(CHAT).ids, **settings)
    assert answer["choices"][0]["text"].rstrip("\ufffd") == expected


@pytest.mark.parametrize(("spelling", "reason"), [("<|return|>", "stop"), ("<|call|>", "stop"), ("<|end|>", "length")])
def test_a_text_ends_with_return_and_call_but_not_with_a_message(
    model: Model, served: Served, spelling: str, reason: str
) -> None:
    """<|call|> is not among the ids that the folder declares; it is known by its name."""
    token = model.tokenizer.token_to_id(spelling)
    answer = chat(served, max_tokens=4, logit_bias={str(token): 100})
    assert answer["choices"][0]["finish_reason"] == reason
    assert answer["usage"]["completion_tokens"] == (1 if reason == "stop" else 4)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_it_is_served_in_bf16_too(model: Model, tmp_path: Path, kernels: str) -> None:
    """What it gives to each of 170 tokens is as near to transformers in fp32 as transformers in bf16 is."""
    text = model.tokenizer.encode(CHAT).ids + model.greedy
    text += model.tokenizer.encode((ROOT / "LICENSE").read_text(encoding="utf-8")).ids[: 170 - len(text)]
    flags = ("--served-model-name", "m", "--dtype", "bfloat16", "--kernels", kernels)
    with serving(model.folder, tmp_path / "log", *flags) as process:
        ours = served_log_probabilities(process, text)
        answer = chat(process, ignore_eos=True, max_tokens=8)
        assert answer["usage"]["completion_tokens"] == 8
        assert process.stop() == 0, process.output()
    oracle = load_gpt_oss_mxfp4(model.folder)
    with torch.no_grad():
        exact, rounded = (log_probabilities(oracle.to(dtype)(torch.tensor([text])).logits[0], text) for dtype in DTYPES)
    check_bf16(ours, rounded, exact)
