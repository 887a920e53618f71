"""A whole step in C is as close to fp32 as the torch reference in bf16, and the same however work is put together."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from server.errors import StartupError
from server.model.native_decoder import NativeDecoder
from server.model.spec import Activation, DenseSpec, LayerSpec, ModelSpec
from server.model.weights import Weights
from server.step import PageKind
from tests.model.paged import PagedSequences, random_texts, run_interleaved
from tests.native.conftest import MakeKernels
from tests.native.models import (
    SPECS,
    VOCAB,
    attention,
    in_fp8,
    in_mxfp4,
    llama,
    model_spec,
    native_sequences,
    packed,
    random_weights,
    reference_sequences,
)

Model = tuple[ModelSpec, Weights]


@pytest.fixture(scope="module", params=[*SPECS, "fp8-llama_uneven", "fp8-mimo_flash", "mxfp4-gpt_oss_one_expert"])
def model(request: pytest.FixtureRequest) -> Model:
    stored, _, name = request.param.rpartition("-")
    spec = SPECS[name]()
    plain = random_weights(spec)
    return spec, in_fp8(plain) if stored == "fp8" else in_mxfp4(plain) if stored == "mxfp4" else plain


def texts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    return random_texts(VOCAB, lengths, seed)


def whole(sequences: PagedSequences, texts: list[list[int]]) -> list[Tensor]:
    """Every text in one chunk, alone."""
    return [sequences.step([(slot, text)])[0] for slot, text in enumerate(texts)]


def rms(errors: Tensor) -> float:
    return errors.double().square().mean().sqrt().item()


def test_hidden_states_are_as_close_to_fp32_as_the_reference_in_bf16(model: Model, make_kernels: MakeKernels) -> None:
    spec, weights = model
    texts = texts_of(330, 150, 64, 17, 1)
    expected = torch.cat(whole(reference_sequences(spec, weights, torch.float32, tokens=1024), texts))
    plain = torch.cat(
        run_interleaved(reference_sequences(spec, weights, torch.bfloat16, tokens=1024), texts, (1, 7, 64))
    )
    ours = torch.cat(run_interleaved(native_sequences(spec, weights, make_kernels(), tokens=1024), texts, (1, 7, 64)))
    assert ours.dtype is torch.bfloat16
    errors, reference = (ours.float() - expected).abs(), (plain.float() - expected).abs()
    assert errors.median() <= 1.1 * reference.median() + 1e-3
    assert rms(errors) <= 1.5 * rms(reference)


def test_chunks_batches_pages_and_threads_change_no_bit(model: Model, make_kernels: MakeKernels) -> None:
    spec, weights = model
    texts = texts_of(300, 131, 40, 9, 1)
    expected = whole(native_sequences(spec, weights, make_kernels(), page_tokens=16, tokens=1024), texts)
    # In a long chunk, token by token, in any mixture; pages of one token; poison where nobody may look.
    for threads, page_tokens, chunks, poison in (
        (1, 4, (1,), 0.0),
        (2, 1, (1, 7, 64), math.nan),
        (3, 64, (1, 2, 3, 97, 130), -7e28),
        (2, 16, (10_000,), math.nan),
    ):
        kernels = make_kernels(threads)
        sequences = native_sequences(
            spec, weights, kernels, page_tokens=page_tokens, tokens=1024, poison=poison, seed=threads
        )
        for text, ours, alone in zip(texts, run_interleaved(sequences, texts, chunks), expected, strict=True):
            same = (ours == alone).all(-1)
            assert same.all(), f"{threads} threads, chunks of {chunks}: token {int(same.int().argmin())} of {len(text)}"


@pytest.mark.parametrize("name", ["llama", "mimo_pro", "gpt_oss", "gpt_oss_one_expert", "gemma3"])
def test_a_decode_over_a_long_context_is_cut_among_threads_and_changes_no_bit(
    name: str, make_kernels: MakeKernels
) -> None:
    """Beyond 256 keys and with few rows every segment of keys goes to whoever is free."""
    spec = SPECS[name]()
    weights = random_weights(spec)
    texts = texts_of(1500, 700)
    settings = {"page_tokens": 16, "tokens": 2300}
    runs = []
    for threads, last in ((1, 1), (2, 1), (3, 1), (8, 1), (3, 2), (8, 3)):
        sequences = native_sequences(spec, weights, make_kernels(threads), **settings)
        parts = [sequences.step([(slot, text[:-6])])[0] for slot, text in enumerate(texts)]
        for start in range(-6, 0, last):
            rows = [(slot, text[start : start + last or None]) for slot, text in enumerate(texts)]
            parts += sequences.step(rows) if start < -3 else [sequences.step([row])[0] for row in rows]
        runs.append(torch.cat([part for part in parts if part.shape[0] <= 3]))
    ends = [
        sequences.step([(slot, text)])[0][-6:]
        for slot, text in enumerate(texts)
        for sequences in [native_sequences(spec, weights, make_kernels(), **settings)]
    ]
    by_position = torch.stack(ends, 1)  # [6, 2, M]
    for run, last in zip(runs, (1, 1, 1, 1, 2, 3), strict=True):
        ordered = run.view(6 // last, 2, last, -1).transpose(1, 2).reshape(6, 2, -1)
        assert torch.equal(ordered, by_position)


@pytest.mark.parametrize("name", ["llama", "mimo_pro", "gpt_oss"])
@pytest.mark.parametrize("tokens", [5, 16, 33, 100])
def test_a_short_piece_of_a_long_prompt_is_cut_among_threads_and_changes_no_bit(
    name: str, tokens: int, make_kernels: MakeKernels
) -> None:
    """Its queries go to the threads in blocks of another size than one thread takes, beside decodes and alone."""
    spec = SPECS[name]()
    weights = random_weights(spec)
    prompt, *others = texts_of(1_200, 300, 40)
    runs = []
    for threads, alone in ((1, True), (2, True), (2, False), (3, False), (8, True), (16, False)):
        sequences = native_sequences(spec, weights, make_kernels(threads), page_tokens=16, tokens=2_000)
        sequences.step([(0, prompt[:-tokens]), *((slot, text[:-1]) for slot, text in enumerate(others, 1))])
        decodes = [] if alone else [(slot, text[-1:]) for slot, text in enumerate(others, 1)]
        *_, piece = sequences.step([*decodes, (0, prompt[-tokens:])])
        runs.append(piece)
    assert all(torch.equal(each, runs[0]) for each in runs)


def test_several_thousand_keys_are_as_close_to_fp32_as_the_reference(make_kernels: MakeKernels) -> None:
    spec = SPECS["gpt_oss"]()
    weights = random_weights(spec)
    (text,) = texts_of(5000)
    results = []
    for sequences in (
        reference_sequences(spec, weights, torch.float32, page_tokens=16, tokens=5100),
        reference_sequences(spec, weights, torch.bfloat16, page_tokens=16, tokens=5100),
        native_sequences(spec, weights, make_kernels(2), page_tokens=16, tokens=5100),
    ):
        sequences.step([(0, text[:4900])])
        results.append(
            torch.cat(
                [
                    sequences.step([(0, text[4900:4960])])[0],
                    *(sequences.step([(0, [token])])[0] for token in text[4960:]),
                ]
            ).float()
        )
    exact, plain, ours = results
    assert rms(ours - exact) <= 1.5 * rms(plain - exact)


def test_many_rows_at_once_are_what_each_is_alone(make_kernels: MakeKernels) -> None:
    """64 rows in one step: prompts of some tokens beside single ones."""
    for name in ("gemma3", "gpt_oss"):
        spec = SPECS[name]()
        weights = random_weights(spec)
        generator = random.Random(3)
        texts = texts_of(*(generator.randint(20, 70) for _ in range(64)))
        cuts = [generator.randint(0, len(text) - 1) for text in texts]
        settings = {"slots": 64, "page_tokens": 4, "tokens": 4200}
        alone = native_sequences(spec, weights, make_kernels(), **settings)
        expected = whole(alone, texts)
        together = native_sequences(spec, weights, make_kernels(2), **settings)
        first = [(slot, text[:cut]) for slot, (text, cut) in enumerate(zip(texts, cuts, strict=True)) if cut]
        together.step(first)
        rest = [
            (slot, text[cut : cut + generator.choice((1, 1, 1, 40))])
            for slot, (text, cut) in enumerate(zip(texts, cuts, strict=True))
        ]
        for slot, ours in enumerate(together.step(rest)):
            assert torch.equal(ours, expected[slot][cuts[slot] : cuts[slot] + len(ours)])


def test_a_broken_row_spoils_no_other_and_does_not_pass_for_a_whole_one(
    model: Model, make_kernels: MakeKernels
) -> None:
    """All K and V of one sequence turn to NaN, or to infinity: beside it others keep every bit."""
    spec, weights = model
    texts = texts_of(300, 290, 20)
    for threads, value in ((1, math.nan), (3, math.nan), (2, math.inf)):
        settings = {"page_tokens": 4, "tokens": 1024}
        sequences = native_sequences(spec, weights, make_kernels(threads), **settings)
        expected = whole(sequences, texts)
        sequences = native_sequences(spec, weights, make_kernels(threads), **settings)
        sequences.step([(slot, text[:-1]) for slot, text in enumerate(texts)])
        for kind in PageKind:
            if kind == PageKind.WINDOW and not sequences.arena.layout.has_window:
                continue
            for logical in range(sequences.oldest_window_page[1] if kind == PageKind.WINDOW else 0, 289 // 4):
                page = sequences.tables[kind][1, logical]
                sequences.arena.page_bytes(kind, int(page)).view(torch.bfloat16).fill_(value)  # type: ignore[arg-type]
        results = sequences.step([(slot, text[-1:]) for slot, text in enumerate(texts)])
        assert torch.equal(results[0], expected[0][-1:])
        assert torch.equal(results[2], expected[2][-1:])
        assert results[1].isnan().any()


def test_numbers_that_are_broken_in_the_middle_of_a_context_are_not_left_out(make_kernels: MakeKernels) -> None:
    """NaN in the keys of a whole segment, sound ones before and behind it, with and without cutting among threads."""
    spec = llama()
    weights = random_weights(spec)
    (text,) = texts_of(800)
    for threads in (1, 3):
        sequences = native_sequences(spec, weights, make_kernels(threads), page_tokens=16, tokens=1024)
        sequences.step([(0, text[:-1])])
        for logical in range(256 // 16, 512 // 16):
            page = sequences.tables[PageKind.FULL][0, logical]
            sequences.arena.page_bytes(PageKind.FULL, int(page)).view(torch.bfloat16).fill_(math.nan)  # type: ignore[arg-type]
        assert sequences.step([(0, text[-1:])])[0].isnan().any()


def test_the_embedding_read_from_the_head_is_the_embedding(make_kernels: MakeKernels) -> None:
    for name in ("llama_uneven", "gemma3"):
        spec = SPECS[name]()
        weights = random_weights(spec)
        texts = [list(range(VOCAB))]
        runs = [
            whole(native_sequences(spec, weights, make_kernels(), embeds_from_head=shared), texts)[0]
            for shared in (False, True)
        ]
        assert torch.equal(*runs)


def test_int8_weights_are_near_and_their_embedding_is_that_of_the_head(make_kernels: MakeKernels) -> None:
    for name in SPECS:
        spec = SPECS[name]()
        weights = random_weights(spec)
        texts = texts_of(150, 40)
        expected = torch.cat(whole(reference_sequences(spec, weights, torch.float32), texts))
        shared = spec.tied_embeddings
        runs = []
        for threads, chunks in ((1, (10_000,)), (3, (1, 5, 60))):
            kernels = make_kernels(threads, int8=True)
            sequences = native_sequences(spec, weights, kernels, embeds_from_head=shared)
            runs.append(torch.cat(run_interleaved(sequences, texts, chunks)))
        assert torch.equal(*runs)
        assert (runs[0].float() - expected).abs().median() < 0.12 * expected.abs().median()


def test_logits_are_the_head_times_the_hidden_states(make_kernels: MakeKernels) -> None:
    spec = llama()
    weights = random_weights(spec)
    kernels = make_kernels(2)
    decoder = NativeDecoder(spec, packed(weights, kernels), kernels)
    hidden = torch.randn(5, spec.hidden).bfloat16()
    assert isinstance(weights.head, Tensor)
    assert torch.allclose(decoder.logits(hidden), hidden.float() @ weights.head.float().T, atol=1e-5)
    assert decoder.logits(hidden[:0]).shape == (0, VOCAB)


def test_weights_that_were_not_packed_are_refused(make_kernels: MakeKernels) -> None:
    spec = llama()
    with pytest.raises(TypeError, match="not packed"):
        NativeDecoder(spec, random_weights(spec), make_kernels())


def test_more_heads_to_a_kv_head_than_c_has_room_for_are_refused(make_kernels: MakeKernels) -> None:
    mlp = DenseSpec(width=32, activation=Activation.SILU)
    kernels = make_kernels()
    for heads, kv_heads in ((96, 1), (97, 1), (192, 1)):
        spec = model_spec((LayerSpec(attention=attention(heads, kv_heads, 4), mlp=mlp),))
        weights = packed(random_weights(spec), kernels)
        if heads == 96:
            texts = texts_of(40, 3)
            exact = torch.cat(whole(reference_sequences(spec, random_weights(spec), torch.float32, tokens=64), texts))
            ours = torch.cat(whole(native_sequences(spec, random_weights(spec), kernels, tokens=64), texts))
            assert rms(ours.float() - exact) < 0.02 * rms(exact)
            continue
        with pytest.raises(StartupError, match=f"{heads}.*--kernels torch"):
            NativeDecoder(spec, weights, kernels)
