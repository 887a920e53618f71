"""A real hybrid sliding-window model over HTTP: Gemma 3 270M, base weights without a chat template of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.processes import Served, serving

MODEL = "gemma3-270m"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("gemma") / "log"
    with serving(
        MODEL, log, "--dtype", "float32", "--max-model-len", "4k", "--long-prefill-token-threshold", "256"
    ) as s:
        yield s
        assert s.stop() == 0


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=300)


def test_a_model_without_a_template_chats_with_its_familys(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0
    )
    # bos, <start_of_turn>, user, \n, Say, hello, ., <end_of_turn>, \n, <start_of_turn>, model, \n
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 12


def test_a_prompt_of_three_windows_is_understood_and_its_pages_come_back(served: Served, client: openai.OpenAI) -> None:
    facts = "".join(f"Item {n} costs {n * 7 % 100} coins. " for n in range(170))
    prompt = f"The capital of Wakanda is Zanzi.\n{facts}\nThe capital of Wakanda is"
    settings: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "temperature": 0}
    answer = client.completions.create(**settings)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 3 * 512
    assert answer.choices[0].text.startswith(" Zanzi"), "only full layers still see the first line"
    assert client.completions.create(**settings).choices[0].text == answer.choices[0].text
    usage = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in httpx.get(f"{served.url}/metrics").text.splitlines()
        if line.startswith(("twinpane:full_token_usage", "twinpane:swa_token_usage"))
    }
    assert usage == {"twinpane:full_token_usage": 0, "twinpane:swa_token_usage": 0}
