"""fp8 and fused checkpoints mean what the split, plain one means: bit by bit, however they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.cpu import CpuKernels
from kernels.quantized import BlockScaled, Matrix, dense
from server.errors import StartupError
from server.model import checkpoint as checkpoint_module
from server.model import weights as weights_module
from server.model.checkpoint import SafetensorsCheckpoint
from server.model.decoder import Decoder
from server.model.families import spec_from_config
from server.model.spec import ModelSpec
from server.model.weights import (
    DenseWeights,
    MoEWeights,
    Weights,
    checkpoint_bytes,
    load_weights,
    weight_bytes,
)
from tests.model.checkpoints import distinct_tensors, load_folder, write_checkpoint
from tests.model.paged import PagedSequences
from tests.model.stored_forms import (
    FORMS,
    FP8_CONFIG,
    PRO8_CONFIG,
    V25_CONFIG,
    attentions,
    exact_tensors,
    fuse,
    fused_fp8,
    in_bf16,
    split_fp8,
    to_fp8,
)

Loaded = tuple[ModelSpec, Weights]
CONFIGS = {"V2.5": V25_CONFIG, "V2.5-Pro": PRO8_CONFIG}
TEXT = torch.randint(0, 128, (180,), generator=torch.Generator().manual_seed(3)).tolist()


def store(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, metadata: Any = None) -> None:
    fused = any("qkv_proj" in name for name in tensors)
    layout = {"attention_projection_layout": "fused_qkv"} if fused else {}
    write_checkpoint(folder, {**config, **layout, "quantization_config": FP8_CONFIG}, tensors)
    if metadata is not None:
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({**json.loads(index.read_text()), "metadata": metadata}))


def load(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, metadata: Any = None) -> Loaded:
    store(folder, config, tensors, metadata=metadata)
    return load_folder(folder)


@pytest.fixture(scope="module", params=CONFIGS)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Loaded]:
    """A split checkpoint in fp32, and its config."""
    config = CONFIGS[request.param]
    return config, load(tmp_path_factory.mktemp("plain"), config, exact_tensors(config))


def logits(spec: ModelSpec, weights: Weights) -> Tensor:
    sequences = PagedSequences(spec, weights, tokens=256)
    return torch.cat(
        [sequences.step([(0, TEXT[:150])])[0], *(sequences.step([(0, [token])])[0] for token in TEXT[150:])]
    )


def matrices(weights: Weights) -> list[Matrix]:
    """Every matrix of the layers, those that run last included."""
    found: list[Matrix] = []
    for layer in (*weights.layers, *(mtp.layer for mtp in weights.mtp)):
        found += [layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down]
    return found


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_logits_of_the_plain_one(
    plain: tuple[dict[str, Any], Loaded], tmp_path: Path, form: str
) -> None:
    config, (spec, expected) = plain
    _, weights = load(tmp_path, config, FORMS[form](exact_tensors(config), config))
    for ours, theirs in zip(matrices(weights), matrices(expected), strict=True):
        assert torch.equal(dense(ours, torch.float32), dense(theirs, torch.float32))
    assert torch.equal(logits(spec, weights), logits(spec, expected))
    if form.startswith("fp8"):
        assert {type(matrix) for matrix in matrices(weights)} == {BlockScaled, Tensor}, "o_proj alone is bf16"


@pytest.mark.parametrize("form", [form for form in FORMS if form.startswith("fp8")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_the_codes(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    store(tmp_path, V25_CONFIG, FORMS[form](exact_tensors(V25_CONFIG), V25_CONFIG))
    spec, weights = load_folder(tmp_path, dtype=dtype)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    taken = sum(tensor.nbytes for tensor in distinct_tensors(weights))
    assert taken == weight_bytes(spec, dtype, checkpoint=checkpoint)
    assert taken < 0.7 * weight_bytes(spec, dtype)


def test_progress_counts_fused_tensors_once_and_scales_too(tmp_path: Path) -> None:
    tensors = fused_fp8(exact_tensors(V25_CONFIG), V25_CONFIG, 4)
    store(tmp_path, V25_CONFIG, tensors)
    spec = spec_from_config(json.loads((tmp_path / "config.json").read_text()), mtp_layers=1)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    read: list[int] = []
    load_weights(spec, checkpoint, torch.float32, progress=read.append)
    assert sum(read) == checkpoint_bytes(spec, checkpoint) == sum(tensor.nbytes for tensor in tensors.values())


def test_reading_in_small_pieces_changes_nothing(
    plain: tuple[dict[str, Any], Loaded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, (_, expected) = plain
    monkeypatch.setattr(weights_module, "_CHUNK_BYTES", 5000)
    monkeypatch.setattr(weights_module, "_PACKED_BYTES", 3000)
    monkeypatch.setattr(checkpoint_module, "_VIEW_BYTES", 1000)
    monkeypatch.setattr(checkpoint_module, "_MAPPED_BYTES", 10_000)
    monkeypatch.setattr(checkpoint_module, "_MAPPED_BYTES_PER_TENSOR", 1)
    monkeypatch.setattr(weights_module, "_IN_FLIGHT_BYTES", 1)
    for form in ("fp8 fused in chunks", "bf16 fused in chunks"):
        folder = tmp_path / form
        folder.mkdir()
        _, weights = load(folder, config, FORMS[form](exact_tensors(config), config))
        for ours, theirs in zip(matrices(weights), matrices(expected), strict=True):
            assert torch.equal(dense(ours, torch.float32), dense(theirs, torch.float32))


@pytest.mark.parametrize("chunks", [1, 4])
def test_any_split_of_the_rows_is_lossless(tmp_path: Path, chunks: int) -> None:
    """However tensor parallelism cuts q, k and v: at heads, inside a block of 128 rows, anywhere."""
    _, weights = load(tmp_path, V25_CONFIG, fused_fp8(exact_tensors(V25_CONFIG), V25_CONFIG, chunks))
    for layer in weights.layers:
        qkv = layer.attention.qkv
        assert isinstance(qkv, BlockScaled)
        values = qkv.dequantize(torch.float32)
        for start, stop in ((0, 192), (192, 1000), (100, 101), (16 * 192 - 5, 16 * 192 + 70), (3000, qkv.shape[0])):
            assert torch.equal(qkv[start:stop].dequantize(torch.float32), values[start:stop])


def test_o_proj_stays_bf16_and_a_mixed_matrix_becomes_plain(tmp_path: Path) -> None:
    """ignored_layers can name one part of a matrix that is joined from several."""
    tensors = exact_tensors(V25_CONFIG)
    stored = split_fp8(tensors, V25_CONFIG)
    name = "model.layers.0.self_attn.k_proj.weight"
    stored[name] = tensors[name].bfloat16()
    del stored[f"{name}_scale_inv"]
    for layer in ("1", "3"):
        expert = f"model.layers.{layer}.mlp.experts.2.up_proj.weight"
        stored[expert] = tensors[expert]
        del stored[f"{expert}_scale_inv"]
    spec, weights = load(tmp_path, V25_CONFIG, stored)
    qkv = weights.layers[0].attention.qkv
    assert isinstance(qkv, Tensor)
    assert torch.equal(qkv, torch.cat([tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]))
    moe = weights.layers[1].mlp
    assert isinstance(moe, MoEWeights)
    assert isinstance(moe.gate_up, Tensor)
    assert isinstance(moe.down, BlockScaled)
    assert torch.equal(moe.gate_up[1, :136], tensors["model.layers.1.mlp.experts.1.gate_proj.weight"])
    taken = sum(tensor.nbytes for tensor in distinct_tensors(weights))
    assert taken == weight_bytes(spec, torch.float32, checkpoint=SafetensorsCheckpoint(tmp_path))


def test_loaded_values_are_those_of_a_plain_definition(tmp_path: Path) -> None:
    """Block by block, chunk by chunk, written out: code times the scale of its block, chunk after chunk."""
    tensors = fused_fp8(exact_tensors(V25_CONFIG), V25_CONFIG, 4)
    _, weights = load(tmp_path, V25_CONFIG, tensors)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    codes, scales = tensors[name].float(), tensors[f"{name}_scale_inv"]
    chunk_rows, parts = 1088, {"q": 768, "k": 192, "v": 128}
    assert (codes.shape[0], scales.shape[0]) == (4 * chunk_rows, 4 * 9)
    found: dict[str, list[Tensor]] = {part: [] for part in parts}
    for chunk in range(4):
        row_in_chunk = 0
        for part, rows in parts.items():
            for _ in range(rows):
                row = chunk * chunk_rows + row_in_chunk
                row_scales = scales[chunk * 9 + row_in_chunk // 128]
                found[part].append(torch.cat((codes[row, :128] * row_scales[0], codes[row, 128:] * row_scales[1])))
                row_in_chunk += 1
    expected = torch.cat([torch.stack(rows) for rows in found.values()])
    assert torch.equal(dense(weights.layers[0].attention.qkv, torch.float32), expected)


def test_the_index_says_how_many_chunks_there_are(tmp_path: Path) -> None:
    """tp_size goes before the number of KV heads, where both would fit."""
    tensors = exact_tensors(PRO8_CONFIG)
    _, weights = load(tmp_path, PRO8_CONFIG, in_bf16(fuse(tensors, PRO8_CONFIG, 4)[0]), metadata={"tp_size": "4"})
    expected = torch.cat([tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(dense(weights.layers[0].attention.qkv, torch.float32), expected)


def test_a_layer_that_tells_the_layouts_apart_speaks_for_those_that_do_not(tmp_path: Path) -> None:
    """Window layers of V2.5 have as many rows of scales in chunks as in one piece; its full layers do not."""
    tensors = exact_tensors(V25_CONFIG)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    chunked, one_piece = (fused_fp8(tensors, V25_CONFIG, chunks) for chunks in (4, 1))
    assert chunked[f"{name}_scale_inv"].shape == one_piece[f"{name}_scale_inv"].shape
    _, weights = load(tmp_path, V25_CONFIG, one_piece)
    expected = torch.cat([tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(dense(weights.layers[1].attention.qkv, torch.float32), expected)


QKV = "model.layers.0.self_attn.qkv_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize("rows", [0, 1, 33, 35, 37, 72])
def test_scales_that_no_layout_explains_are_named_with_their_numbers(tmp_path: Path, rows: int) -> None:
    tensors = fused_fp8(exact_tensors(V25_CONFIG), V25_CONFIG, 4)
    tensors[f"{QKV}_scale_inv"] = torch.ones(rows, 2)
    with pytest.raises(
        StartupError,
        match=rf"tensor {QKV} has {rows} rows of scales for its 4352 rows, expected 36 for 4 chunks, 34 for 1 chunk",
    ):
        load(tmp_path, V25_CONFIG, tensors)


def test_layers_of_different_layouts_are_refused(tmp_path: Path) -> None:
    tensors = exact_tensors(V25_CONFIG)
    stored, other = fused_fp8(tensors, V25_CONFIG, 4), fused_fp8(tensors, V25_CONFIG, 1)
    name = "model.layers.3.self_attn.qkv_proj.weight"
    stored |= {each: other[each] for each in (name, f"{name}_scale_inv")}
    with pytest.raises(StartupError, match=rf"{name} has 34 rows of scales .* same number of chunks in all layers"):
        load(tmp_path, V25_CONFIG, stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{K}_scale_inv": torch.ones(7, 2)}, rf"{K}_scale_inv has 7 rows, expected 6 or 8 for the 768 rows of {K}"),
        ({f"{K}_scale_inv": torch.ones(6, 1)}, rf"{K}_scale_inv has shape \[6, 1\], expected 2 columns for {K} with"),
        ({f"{K}_scale_inv": torch.ones(())}, rf"{K}_scale_inv has shape \[\], expected 2 columns"),
        ({f"{K}_scale_inv": torch.ones(6, 2).double()}, rf"{K}_scale_inv is F64, expected F32 or BF16"),
        ({f"{K}_scale_inv": None}, rf"tensor {K} is fp8 without {K}_scale_inv; only fp8 with a scale for 128 x 128"),
        (
            {f"{K}_scale_inv": None, f"{K}_scale": torch.ones(1)},
            rf"does not use: 1 tensor: {K}_scale",
        ),
        ({K: torch.ones(768, 160).to(torch.float8_e5m2)}, rf"{K} is F8_E5M2; of the fp8 formats only F8_E4M3"),
        ({K: torch.ones(768, 160)}, rf"tensor {K} is F32 and has scales"),
    ],
)
def test_other_scales_are_refused(tmp_path: Path, change: dict[str, Tensor | None], message: str) -> None:
    stored = split_fp8(exact_tensors(V25_CONFIG), V25_CONFIG)
    for name, tensor in change.items():
        if tensor is None:
            del stored[name]
        else:
            stored[name] = tensor
    with pytest.raises(StartupError, match=message):
        load(tmp_path, V25_CONFIG, stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": None}, r"weight_block_size is None, only \[128, 128\] is supported; fp8 with one scale"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size is \[64, 128\], only"),
        ({"fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
        ({"activation_scheme": "static"}, "activation_scheme = 'static' is not supported"),
        ({"quant_method": "compressed-tensors"}, "quant_method 'compressed-tensors' is not supported"),
    ],
)
def test_other_schemes_are_refused_by_their_config(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        spec_from_config({**V25_CONFIG, "quantization_config": {**FP8_CONFIG, **change}})


@pytest.mark.parametrize("tp_size", ["many", "0", -1, 1.5, None])
def test_a_tp_size_that_is_no_number_is_refused(tmp_path: Path, tp_size: object) -> None:
    with pytest.raises(StartupError, match=r"tp_size .* expected a whole number"):
        load(tmp_path, V25_CONFIG, fused_fp8(exact_tensors(V25_CONFIG), V25_CONFIG, 4), metadata={"tp_size": tp_size})


LLAMA = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 300,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def test_other_families_load_the_same_fp8(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"self_attn.q_proj": (192, 192), "self_attn.k_proj": (96, 192), "self_attn.v_proj": (96, 192)}
    shapes |= {"self_attn.o_proj": (192, 192), "mlp.gate_proj": (300, 192), "mlp.up_proj": (300, 192)}
    shapes |= {"mlp.down_proj": (192, 300)}
    values = {
        f"model.layers.{layer}.{name}.weight": torch.randint(-15, 16, shape, generator=generator).float() / 256
        for layer in range(2)
        for name, shape in shapes.items()
    }
    rest = {"model.norm.weight": torch.ones(192), "lm_head.weight": torch.randn(128, 192, generator=generator)}
    rest["model.embed_tokens.weight"] = torch.randn(128, 192, generator=generator)
    for layer in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            rest[f"model.layers.{layer}.{norm}.weight"] = torch.ones(192)
    coded = {name: to_fp8(tensor) for name, tensor in values.items()}
    stored = {name: codes for name, (codes, _) in coded.items()}
    stored |= {f"{name}_scale_inv": scales for name, (_, scales) in coded.items()}
    folders = tmp_path / "plain", tmp_path / "fp8"
    for folder, tensors in zip(folders, (values, stored), strict=True):
        folder.mkdir()
        write_checkpoint(folder, {**LLAMA, "quantization_config": FP8_CONFIG}, tensors | rest)
    (spec, expected), (_, weights) = map(load_folder, folders)
    assert isinstance(weights.layers[0].mlp, DenseWeights)
    assert isinstance(weights.layers[0].mlp.down, BlockScaled)
    assert torch.equal(logits(spec, weights), logits(spec, expected))


def test_fp8_runs_in_bf16_on_packed_and_plain_matrices_alike(tmp_path: Path) -> None:
    store(tmp_path, V25_CONFIG, fused_fp8(exact_tensors(V25_CONFIG), V25_CONFIG, 4))
    spec, plain = load_folder(tmp_path, dtype=torch.bfloat16)
    kernels = CpuKernels()
    packed = load_weights(spec, SafetensorsCheckpoint(tmp_path), torch.bfloat16, pack=kernels.pack)
    found = []
    for weights, backend in ((plain, None), (packed, kernels)):
        sequences = PagedSequences(spec, weights, tokens=256, dtype=torch.bfloat16)
        if backend is not None:
            sequences.decoder = Decoder(spec, weights, backend)
        found.append(sequences.step([(0, TEXT)])[0].float())
    assert (found[0] - found[1]).abs().median() < 0.02 * found[0].abs().median()


def test_scales_in_bf16_are_read_as_they_are(tmp_path: Path) -> None:
    stored = split_fp8(exact_tensors(V25_CONFIG), V25_CONFIG)
    _, expected = load(tmp_path, V25_CONFIG, stored)
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({n: t.bfloat16() if n.endswith("_scale_inv") else t for n, t in tensors.items()}, file)
    _, weights = load_folder(tmp_path)
    for ours, theirs in zip(matrices(weights), matrices(expected), strict=True):
        assert torch.equal(dense(ours, torch.float32), dense(theirs, torch.float32))


def test_each_attention_has_its_own_kind_of_heads() -> None:
    """Of what writes the files here: the window layers and the MTP layer have eight KV heads, the full ones four."""
    assert [a.kv_heads for a in attentions(V25_CONFIG)] == [4, 8, 8, 4, 8]
