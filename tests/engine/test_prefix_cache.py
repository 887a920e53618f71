"""Cache on equals cache off, with real tensors: conversations that go on, branch and come again, in little memory, with
windows that are lost and rebuilt."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from server.model.source import OWN_MODELS
from server.model.spec import ModelSpec
from server.model.weights import Weights
from server.request import RequestId, SamplingParams
from server.step import PageKind, RowPlan
from tests.engine.real import RealHouse, load_mimo
from tests.model.checkpoints import load_folder
from tests.model.test_parity import gemma3, gpt_oss, llama, randomize

VOCAB = 97
LOGPROB_TOLERANCE = 1e-4
Model = tuple[ModelSpec, Weights]


def from_oracle(make: Callable[[], PreTrainedModel]) -> Callable[[Path], Model]:
    def load(folder: Path) -> Model:
        torch.manual_seed(0)
        oracle = make().eval().float()
        randomize(oracle)
        oracle.save_pretrained(folder)
        return load_folder(folder)

    return load


MODELS: dict[str, Callable[[Path], Model]] = {
    "gemma3": from_oracle(gemma3),
    "gpt_oss": from_oracle(gpt_oss),
    "mimo": lambda folder: load_mimo(folder, window=16),
    "llama": from_oracle(llama),
    "tiny": lambda _: load_folder(OWN_MODELS["tiny"]),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return MODELS[request.param](tmp_path_factory.mktemp("model"))


class Talks:
    """Prompts drawn from what was said before, and what two houses answer: one with a cache and one without."""

    def __init__(self, model: Model, seed: int, *, page_tokens: int, slabs: int, chunk: int) -> None:
        self.rng = random.Random(seed)
        settings = {"page_tokens": page_tokens, "prefill_chunk_tokens": chunk, "step_token_budget": 2 * chunk}
        self.cached = RealHouse(*model, slabs=slabs, prefix_caching=True, max_sequences=4, **settings)
        self.plain = RealHouse(*model, slabs=2_000, max_sequences=4, **settings)
        self.texts: list[list[int]] = [[]]
        self.asked: list[RequestId] = []

    def ask(self) -> None:
        rng = self.rng
        known = rng.choice(self.texts[-5:])
        prompt = known[: rng.choice([len(known), len(known), rng.randint(0, len(known))])][-220:]
        prompt = [*prompt, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 30)))]
        name = f"r{len(self.asked)}"
        outputs = rng.randint(1, 12)
        for house in (self.cached, self.plain):
            house.submit(name, prompt, outputs=outputs, sampling=SamplingParams(temperature=0.0, logprobs=0))
        self.asked.append(RequestId(name))

    def lose_windows(self) -> None:
        """Every snapshot that nobody reads is evicted: whoever comes back has to rebuild."""
        cache = self.cached.cache
        for snapshot in [each for node in cache._tree.nodes() for each in node.snapshots.values()]:
            cache._evict_snapshot(snapshot)
        cache.check()

    def run(self) -> None:
        for house in (self.cached, self.plain):
            house.run()
        for name in self.asked[-3:]:
            prompt = list(self.cached.prompts[name])
            self.texts.append(prompt + self.cached.texts(name)[0])

    def assert_equal(self) -> None:
        for name in self.asked:
            ours, theirs = self.cached.outputs[name][0], self.plain.outputs[name][0]
            assert ours.tokens == theirs.tokens
            for one, other in zip(ours.sampled, theirs.sampled, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 8, 64, 1_000])
def test_conversations_are_answered_alike(model: Model, chunk: int) -> None:
    talks = Talks(model, chunk, page_tokens=4, slabs=400, chunk=chunk)
    for round_number in range(8):
        for _ in range(2):
            talks.ask()
        talks.run()
        if round_number % 2:
            talks.lose_windows()
    talks.assert_equal()
    hits = sum(facts.cached_tokens for facts in talks.cached.ended.values())
    assert hits > 50
    has_window = talks.cached.layout.has_window
    assert bool(talks.cached.cache.rebuilt_tokens) == has_window
    talks.cached.assert_empty()


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_in_little_memory_what_is_evicted_is_computed_again(model: Model, page_tokens: int) -> None:
    """Pages smaller and larger than the window; others' bytes are poisoned in between."""
    slabs = next(
        slabs
        for slabs in range(1, 2_000)
        if RealHouse(*model, page_tokens=page_tokens, slabs=slabs, prefill_chunk_tokens=16).scheduler.context_tokens
        > 280
    )
    talks = Talks(model, page_tokens, page_tokens=page_tokens, slabs=slabs + slabs // 4, chunk=16)
    evicted = talks.cached.cache.evicted
    for round_number in range(100):
        if round_number >= 14 and any(evicted.values()):
            break
        if round_number % 3 == 0:
            talks.texts.append([])  # somebody new
        talks.ask()
        talks.run()
        talks.cached.poison([1e30, -3e20][round_number % 2])
    talks.assert_equal()
    assert any(evicted.values())
    talks.cached.assert_empty()


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mimo", "tiny"])
def test_chats_that_take_turns_are_never_computed_again_where_only_windows_are_lost(
    family: str, tmp_path: Path
) -> None:
    """Eight chats of ten turns in an arena that holds their full K/V, and not the windows of all of them."""
    model, page_tokens, turn_tokens = MODELS[family](tmp_path), 4, 24
    house = RealHouse(*model, page_tokens=page_tokens, slabs=1, prefix_caching=True, prefill_chunk_tokens=32)
    cut = house.layout
    full_bytes = 8 * (10 * turn_tokens // page_tokens + 1) * cut.full_page_bytes
    windows = house.cache.peak_demand(10 * turn_tokens, 32).window + 3 * house.cache.pages_for(cut.window_tokens)
    slabs = -(-(full_bytes + windows * cut.window_page_bytes) // cut.slab_bytes) + 2
    house = RealHouse(*model, page_tokens=page_tokens, slabs=slabs, prefix_caching=True, prefill_chunk_tokens=32)
    rng = random.Random(family)
    texts: list[list[int]] = [[] for _ in range(8)]
    span = house.cache._prices.rebuild.span_tokens
    for turn in range(10):
        for chat, text in enumerate(texts):
            known = len(text)
            text += [rng.randrange(VOCAB) for _ in range(turn_tokens)]
            rows: list[RowPlan] = []
            house.submit(f"{chat}.{turn}", text, outputs=1, sampling=SamplingParams(temperature=0.0))
            house.run(before=lambda plan, rows=rows: rows.extend(plan.rows))  # type: ignore[misc]
            computed = sum(row.stop - max(row.start, row.cached) for row in rows)
            rebuilt = sum(max(0, min(row.stop, row.cached) - row.start) for row in rows)
            assert computed <= len(text) - known + page_tokens
            assert rebuilt <= min(span, known)
    assert house.cache.evicted[PageKind.WINDOW] > 0
    assert house.cache.rebuilt_tokens > 0
    house.assert_empty()
