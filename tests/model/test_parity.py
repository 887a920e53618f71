"""The decoder over pages computes what transformers, or the published description, computes over a whole sequence."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    PreTrainedModel,
)

from kernels.reference import ReferenceKernels
from server.model.checkpoint import GGUFCheckpoint
from server.model.decoder import Decoder
from server.model.families import spec_from_gguf
from server.model.gguf_file import GGUFFile
from server.model.spec import ModelSpec
from server.model.weights import Weights, load_weights
from tests.model.checkpoints import PRO_CONFIG, load_folder, pro_tensors, write_checkpoint, write_gguf
from tests.model.dense_reference import mimo_logits
from tests.model.oracle import transformers_model_from_gguf
from tests.model.paged import PagedSequences, random_texts, run_interleaved

TOLERANCE = 1e-4
GREEDY_TOKENS = 12

Model = tuple[PreTrainedModel, ModelSpec, Weights]


def llama(**changes: Any) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        **{"tie_word_embeddings": False, **changes},
    )
    return LlamaForCausalLM(config)


def gemma3(**changes: Any) -> PreTrainedModel:
    config = Gemma3TextConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=20,
        max_position_embeddings=2048,
        **changes,
    )
    return Gemma3ForCausalLM(config)


def mimo(**changes: Any) -> PreTrainedModel:
    config = MiMoV2FlashConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=24,
        v_head_dim=16,
        sliding_window=17,
        moe_intermediate_size=24,
        n_routed_experts=10,
        num_experts_per_tok=3,
        max_position_embeddings=2048,
        **changes,
    )
    return MiMoV2FlashForCausalLM(config)


def gpt_oss(**changes: Any) -> PreTrainedModel:
    sizes = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 19,
        "num_local_experts": 9,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 2048,
    }
    return GptOssForCausalLM(GptOssConfig(**{**sizes, **changes}))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama-tied-biases-head-dim": lambda: llama(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=16
    ),
    "llama-linear-rope": lambda: llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}),
    "llama-llama3-rope": lambda: llama(
        rope_parameters={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 1e4,
        }
    ),
    "llama-yarn-rope": lambda: llama(
        rope_parameters={
            "rope_type": "yarn",
            "factor": 6.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 1e4,
            "mscale": 1.0,
            "mscale_all_dim": 0.4,
        }
    ),
    "gemma3": gemma3,
    "gemma3-linear-rope-uneven-layers": lambda: gemma3(
        layer_types=[
            f"{kind}_attention" for kind in ["full", "sliding", "sliding", "full", "full", "sliding", "sliding"]
        ],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "mimo_v2_flash": mimo,
    "gpt_oss": gpt_oss,
    "gpt_oss-uneven-layers-short-yarn": lambda: gpt_oss(
        layer_types=[f"{kind}_attention" for kind in ["full", "sliding", "full", "full", "sliding"]],
        intermediate_size=72,
        head_dim=24,
        num_attention_heads=6,
        num_key_value_heads=6,
        sliding_window=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 5e3,
            "factor": 4.0,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "original_max_position_embeddings": 96,
            "truncate": True,
        },
    ),
    "gpt_oss-no-attention-bias-tied-given-attention-factor": lambda: gpt_oss(
        attention_bias=False,
        tie_word_embeddings=True,
        num_experts_per_tok=1,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "attention_factor": 1.2},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.manual_seed(0)
    oracle = MODELS[request.param]().eval().float()
    oracle.set_attn_implementation("eager")
    randomize(oracle)
    folder = tmp_path_factory.mktemp("checkpoint")
    oracle.save_pretrained(folder)
    return oracle, *load_folder(folder)


def randomize(model: PreTrainedModel) -> None:
    """transformers starts norms, sinks and biases as ones or zeros, which would hide a missing one."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "inv_freq" in name or "embed_scale" in name:
            continue
        spread = 0.3 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
        centre = 1.0 if re.search("norm", name) and tensor.detach().mean() > 0.5 else 0.0
        with torch.no_grad():
            tensor.copy_(centre + spread * torch.randn_like(tensor))
            if "sinks" in name:
                tensor.mul_(4.0)


@torch.no_grad()
def oracle_logits(oracle: PreTrainedModel, tokens: list[int]) -> Tensor:
    return oracle(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("chunks", [(1,), (7,), (64,), (10_000,), (1, 7, 64, 150)], ids=str)
def test_logits_equal_the_oracle_at_every_position_in_any_chunking(model: Model, chunks: tuple[int, ...]) -> None:
    oracle, spec, weights = model
    lengths = (130, 61, 3) if chunks == (1,) else (320, 131, 64, 17, 1)
    texts = random_texts(spec.vocab, lengths)
    sequences = PagedSequences(spec, weights, page_tokens=4, tokens=1024)
    for text, logits in zip(texts, run_interleaved(sequences, texts, chunks), strict=True):
        error = (logits - oracle_logits(oracle, text)).abs().max()
        assert error <= TOLERANCE, f"{len(text)} tokens: {error}"


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_page_size_changes_nothing(model: Model, page_tokens: int) -> None:
    oracle, spec, weights = model
    texts = random_texts(spec.vocab, (140, 33))
    sequences = PagedSequences(spec, weights, page_tokens=page_tokens, tokens=512)
    for text, logits in zip(texts, run_interleaved(sequences, texts, (1, 7, 64)), strict=True):
        assert (logits - oracle_logits(oracle, text)).abs().max() <= TOLERANCE


def test_greedy_continuations_are_equal(model: Model) -> None:
    oracle, spec, weights = model
    texts = random_texts(spec.vocab, (200, 90, 21, 2), seed=3)
    sequences = PagedSequences(spec, weights, page_tokens=4, tokens=1024)
    last = [logits[-1:] for logits in run_interleaved(sequences, texts, (30, 64))]
    ours = [list(text) for text in texts]
    for _ in range(GREEDY_TOKENS):
        chosen = [int(logits.argmax()) for logits in last]
        for text, token in zip(ours, chosen, strict=True):
            text.append(token)
        last = sequences.step([(slot, [token]) for slot, token in enumerate(chosen)], last_only=True)
    for text, extended in zip(texts, ours, strict=True):
        expected = oracle_logits(oracle, extended)[len(text) - 1 : -1].argmax(-1)
        assert extended[len(text) :] == expected.tolist()


def test_garbage_in_unseen_memory_does_not_change_a_bit(model: Model) -> None:
    _, spec, weights = model
    texts = random_texts(spec.vocab, (150, 40, 9))
    runs = []
    for poison in (0.0, 3e4, -7e28):
        sequences = PagedSequences(spec, weights, page_tokens=4, tokens=512, poison=poison)
        runs.append(torch.cat(run_interleaved(sequences, texts, (1, 5, 33))))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_bf16_is_as_close_to_fp32_as_transformers_is(model: Model, tmp_path: Path) -> None:
    oracle, spec, _ = model
    oracle.save_pretrained(tmp_path)
    _, weights = load_folder(tmp_path, dtype=torch.bfloat16)
    in_bf16 = copy.deepcopy(oracle).to(torch.bfloat16)
    # Long enough that the few large errors, where rounding changes which expert is chosen, are no matter of luck.
    texts = random_texts(spec.vocab, (150, 80, 200, 200, 200, 120))
    sequences = PagedSequences(spec, weights, page_tokens=4, tokens=1200, dtype=torch.bfloat16)
    ours, theirs = [], []
    for text, logits in zip(texts, run_interleaved(sequences, texts, (1, 7, 64)), strict=True):
        expected = oracle_logits(oracle, text)
        assert logits.dtype == torch.float32
        ours.append(logits - expected)
        theirs.append(oracle_logits(in_bf16, text).float() - expected)
    errors, reference = torch.cat(ours), torch.cat(theirs)
    assert errors.abs().median() < 1.2 * reference.abs().median()
    assert errors.square().mean().sqrt() < 1.2 * reference.square().mean().sqrt()


@pytest.fixture(scope="module")
def pro_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pro")
    write_checkpoint(folder, PRO_CONFIG, pro_tensors(PRO_CONFIG))
    return folder


@pytest.mark.parametrize("window_keys", [None, 128])
def test_mimo_pro_equals_its_description(pro_folder: Path, window_keys: int | None) -> None:
    spec, weights = load_folder(pro_folder, window_keys=window_keys)
    assert len(spec.mtp_layers) == 3
    texts = random_texts(spec.vocab, (800, 140), seed=4)
    sequences = PagedSequences(spec, weights, page_tokens=16, tokens=1600)
    for text, logits in zip(texts, run_interleaved(sequences, texts, (1, 64, 100, 300)), strict=True):
        expected = mimo_logits(PRO_CONFIG, pro_tensors(PRO_CONFIG), torch.tensor(text), window_keys or 129)
        assert (logits - expected).abs().max() <= TOLERANCE
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_the_window_option_of_mimo_matters(pro_folder: Path) -> None:
    text = random_texts(128, (200,), seed=5)[0]
    results = []
    for window_keys in (128, 129):
        spec, weights = load_folder(pro_folder, window_keys=window_keys)
        results.append(PagedSequences(spec, weights, tokens=512).step([(0, text)])[0])
    difference = (results[0] - results[1]).abs().amax(-1)
    assert difference[:128].max() <= TOLERANCE
    assert difference[128:].max() > 100 * TOLERANCE


def test_gguf_divisors_of_the_frequencies_are_applied(tmp_path: Path) -> None:
    """A GGUF file says Llama 3's scaling as one divisor per frequency, in rope_freqs.weight."""
    torch.manual_seed(0)
    oracle = MODELS["llama-llama3-rope"]().eval().float()
    randomize(oracle)
    plain = 1e4 ** -(torch.arange(0, 8, 2) / 8)
    divisors = plain / oracle.model.rotary_emb.inv_freq
    assert divisors.max() > 4
    path = tmp_path / "llama3.gguf"
    write_gguf(path, "llama", LLAMA_METADATA, {**gguf_tensors(oracle), "rope_freqs.weight": divisors})
    file = GGUFFile(path)
    spec = spec_from_gguf(file)
    weights = load_weights(spec, GGUFCheckpoint(file), torch.float32)
    text = random_texts(spec.vocab, (300,))[0]
    logits = PagedSequences(spec, weights, tokens=512).step([(0, text)])[0]
    assert (logits - oracle_logits(oracle, text)).abs().max() <= TOLERANCE


LLAMA_METADATA = {
    "embedding_length": 48,
    "block_count": 3,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "feed_forward_length": 64,
    "context_length": 2048,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def gguf_tensors(oracle: PreTrainedModel) -> dict[str, Tensor]:
    """A llama's tensors as GGUF files hold them: other names, and rows of q and k in rotary pairs."""
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    parts |= {"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    parts |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    tensors = {}
    for name, tensor in oracle.state_dict().items():
        module = name.removesuffix(".weight")
        if module in top:
            tensors[f"{top[module]}.weight"] = tensor
            continue
        _, _, layer, part = module.split(".", 3)
        if parts[part] in ("attn_q", "attn_k"):
            tensor = tensor.view(-1, 2, 4, 48).transpose(1, 2).reshape(tensor.shape)
        tensors[f"blk.{layer}.{parts[part]}.weight"] = tensor
    return tensors


class InputOfFirstNorm(ReferenceKernels):
    """Keeps what the first layer gets: norms hide the scale of what they are given."""

    def __init__(self) -> None:
        self.seen: Tensor | None = None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self.seen is None:
            self.seen = x
        return super().rms_norm(x, weight, eps)


def test_gemmas_embeddings_are_scaled_by_the_rounded_root(tmp_path: Path) -> None:
    """The root of 48 is 6.9282; the models were trained with 6.9375, its value in bf16."""
    torch.manual_seed(0)
    oracle = gemma3().to(torch.bfloat16).eval()
    oracle.save_pretrained(tmp_path)
    spec, weights = load_folder(tmp_path, dtype=torch.bfloat16)
    sequences = PagedSequences(spec, weights, tokens=64, dtype=torch.bfloat16)
    kernels = InputOfFirstNorm()
    sequences.decoder = Decoder(spec, weights, kernels)
    text = list(range(40))
    sequences.step([(0, text)])
    assert kernels.seen is not None
    assert torch.equal(kernels.seen, oracle.get_input_embeddings()(torch.tensor(text)))
    assert not torch.equal(kernels.seen, weights.embedding[text] * 48**0.5)


def real_text(file: GGUFFile, space: str) -> list[int]:
    """Tokens of real prose: the whole words of the licence that the vocabulary has."""
    vocabulary = {token: index for index, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    words = (Path(__file__).parents[2] / "LICENSE").read_text().split()
    return [vocabulary[space + word] for word in words * 2 if space + word in vocabulary]


@pytest.mark.parametrize(("fixture", "space", "start"), [("smollm2_gguf", "Ġ", []), ("gemma3_gguf", "▁", [2])])
def test_real_models_answer_as_transformers_does(
    request: pytest.FixtureRequest, fixture: str, space: str, start: list[int]
) -> None:
    path = request.getfixturevalue(fixture)
    file = GGUFFile(path)
    spec = spec_from_gguf(file)
    weights = load_weights(spec, GGUFCheckpoint(file), torch.float32)
    words = real_text(file, space)
    texts = [
        start + words[first : first + length] for first, length in ((0, 20), (50, 90), (7, 333), (20, 700), (0, 2000))
    ]
    assert [len(text) - len(start) for text in texts] == [20, 90, 333, 700, 2000]
    ours = greedy_of_ours(spec, weights, texts, tokens=24)
    oracle = transformers_model_from_gguf(path)
    settings = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    for text, continuation in zip(texts, ours, strict=True):
        tokens = torch.tensor([text])
        expected = oracle.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)[0]
        assert continuation == expected[len(text) :].tolist(), f"prompt of {len(text)} tokens"


def greedy_of_ours(spec: ModelSpec, weights: Weights, texts: list[list[int]], *, tokens: int) -> list[list[int]]:
    """All prompts at once, in chunks of at most 256 tokens, then decoded together."""
    sequences = PagedSequences(spec, weights, page_tokens=16, tokens=4096)
    last: dict[int, Tensor] = {}
    while unfinished := [slot for slot, text in enumerate(texts) if sequences.known[slot] < len(text)]:
        rows = [(slot, texts[slot][sequences.known[slot] :][:256]) for slot in unfinished]
        last |= zip(unfinished, sequences.step(rows, last_only=True), strict=True)
    continuations: list[list[int]] = [[] for _ in texts]
    for _ in range(tokens):
        for slot, continuation in enumerate(continuations):
            continuation.append(int(last[slot].argmax()))
        rows = [(slot, continuation[-1:]) for slot, continuation in enumerate(continuations)]
        last = dict(enumerate(sequences.step(rows, last_only=True)))
    return continuations
