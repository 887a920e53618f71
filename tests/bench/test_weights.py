from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from bench.weights import BF16, Q8_0, Work, check_hf_folder, work_of, write_gguf, write_hf_folder
from server.model.families import spec_from_gguf
from server.model.gguf_file import GGUFFile

HIDDEN, WIDTH, VOCAB, LAYERS, HEADS, KV_HEADS = 64, 96, 64, 2, 4, 2
HEAD_DIM = HIDDEN // HEADS


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers with Q4_1 matrices, as the real files have them."""
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(VOCAB)
    writer.add_file_type(3)
    writer.add_tokenizer_model("gpt2")
    tokens = ["<s>", "</s>", *(chr(ord("!") + index) for index in range(VOCAB - 3)), "!!"]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (VOCAB - 2))
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = random.normal(size=(rows, columns)).astype(np.float32)
        writer.add_tensor(name, quantize(values, GGMLQuantizationType.Q4_1), raw_dtype=GGMLQuantizationType.Q4_1)

    def vector(name: str) -> None:
        writer.add_tensor(name, random.normal(size=HIDDEN).astype(np.float32))

    matrix("token_embd.weight", VOCAB, HIDDEN)
    vector("output_norm.weight")
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_v", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", WIDTH, HIDDEN),
            ("ffn_up", WIDTH, HIDDEN),
            ("ffn_down", HIDDEN, WIDTH),
        ):
            matrix(f"blk.{layer}.{name}.weight", rows, columns)
        vector(f"blk.{layer}.attn_norm.weight")
        vector(f"blk.{layer}.ffn_norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("hf") / "bf16"
    write_hf_folder(source, target)
    return target


def plain_tensors(path: Path) -> dict[str, np.ndarray]:
    return {
        tensor.name: dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist()))).copy()
        for tensor in gguf.GGUFReader(path).tensors
    }


def test_the_folder_holds_the_dequantized_tensors_rounded_to_bf16(source: Path, folder: Path) -> None:
    stored, plain = load_file(folder / "model.safetensors"), plain_tensors(source)
    for name, original in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("model.layers.1.mlp.down_proj", "blk.1.ffn_down"),
        ("model.layers.0.self_attn.v_proj", "blk.0.attn_v"),
    ):
        expected = torch.from_numpy(plain[f"{original}.weight"]).bfloat16()
        assert torch.equal(stored[f"{name}.weight"], expected), name
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def test_every_tensor_is_checked(source: Path, folder: Path) -> None:
    assert check_hf_folder(source, folder) >= 2 + LAYERS * 5


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_one_wrong_number_is_found(source: Path, folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is not that of"):
        check_hf_folder(source, tmp_path)


def test_the_bf16_file_holds_the_same_numbers_as_the_folder(source: Path, tmp_path: Path) -> None:
    write_gguf(source, tmp_path / "bf16.gguf", BF16)
    plain, written = plain_tensors(source), plain_tensors(tmp_path / "bf16.gguf")
    assert written.keys() == plain.keys()
    for name, values in plain.items():
        expected = torch.from_numpy(values)
        if values.ndim == 2:
            expected = expected.bfloat16().float()
        assert np.array_equal(written[name], expected.numpy()), name


def test_the_q8_file_is_made_of_what_the_bf16_file_holds(source: Path, tmp_path: Path) -> None:
    write_gguf(source, tmp_path / "bf16.gguf", BF16)
    write_gguf(source, tmp_path / "q8.gguf", Q8_0)
    rounded, written = plain_tensors(tmp_path / "bf16.gguf"), plain_tensors(tmp_path / "q8.gguf")
    for name, values in rounded.items():
        expected = dequantize(quantize(values, Q8_0), Q8_0) if values.ndim == 2 else values
        assert np.array_equal(written[name], expected.reshape(values.shape)), name


def test_metadata_is_carried_over(source: Path, tmp_path: Path) -> None:
    write_gguf(source, tmp_path / "q8.gguf", Q8_0)
    before, after = dict(GGUFFile(source).metadata), dict(GGUFFile(tmp_path / "q8.gguf").metadata)
    assert (before.pop("general.file_type"), after.pop("general.file_type")) == (3, 7)
    assert after == before


def test_work_counts_what_a_token_passes(source: Path) -> None:
    file = GGUFFile(source)
    work = work_of(spec_from_gguf(file), file)
    layer = 2 * HIDDEN * HIDDEN + 2 * KV_HEADS * HEAD_DIM * HIDDEN + 3 * WIDTH * HIDDEN
    assert (work.body, work.head) == (LAYERS * layer, VOCAB * HIDDEN)
    assert work.decode_bytes(2.0) == 2 * (work.body + work.head)


@pytest.mark.parametrize(("tokens", "window"), [(5, None), (5, 3), (5, 5), (3, 8), (100, 7)])
def test_prefill_counts_the_keys_that_each_query_sees(tokens: int, window: int | None) -> None:
    work = Work(body=10, head=7, layers=((2, 4, 6, window),))
    pairs = sum(min(position + 1, window or tokens) for position in range(tokens))
    assert work.prefill_flop(tokens) == 2 * 10 * tokens + 2 * 7 + 2 * 2 * (4 + 6) * pairs
