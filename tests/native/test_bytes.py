"""What a decode step reads, counted by the kernels themselves."""

from __future__ import annotations

import pytest
import torch

from server.model.batch import Batch
from server.model.checkpoint import GGUFCheckpoint
from server.model.families import spec_from_gguf
from server.model.gguf_file import GGUFFile
from server.model.native_decoder import NativeDecoder
from server.model.spec import ModelSpec
from server.model.weights import load_weights, weight_bytes
from tests.model.paged import make_arena
from tests.native.conftest import MakeKernels

PAGE = 16


def live_kv_bytes(spec: ModelSpec, context: int) -> int:
    """K and V that a query at position context - 1 sees, in bf16."""
    seen = [min(context, layer.attention.window_keys or context) for layer in spec.layers]
    elements = [layer.attention.kv_elements_per_token for layer in spec.layers]
    return 2 * sum(count * each for count, each in zip(seen, elements, strict=True))


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("model", ["smollm2_gguf", "gemma3_gguf"])
def test_a_decode_step_reads_weights_and_live_keys_once(
    model: str, int8: bool, make_kernels: MakeKernels, request: pytest.FixtureRequest
) -> None:
    file = GGUFFile(request.getfixturevalue(model))
    spec = spec_from_gguf(file)
    kernels = make_kernels(2, int8=int8)
    checkpoint = GGUFCheckpoint(file)
    weights = load_weights(spec, checkpoint, torch.bfloat16, pack=kernels.pack, embeds_from_head=True)
    decoder = NativeDecoder(spec, weights, kernels)
    rows, context = 8, 1000
    pages = -(-context // PAGE)
    arena = make_arena(spec, page_tokens=PAGE, pages=rows * pages, dtype=torch.bfloat16)
    full = torch.arange(rows * pages, dtype=torch.int32).view(rows, pages)
    first_window = -(-rows * pages // arena.layout.full_pages_per_slab) * arena.layout.window_pages_per_slab
    batch = Batch([(slot, context - 1, 1) for slot in range(rows)], full, full + first_window)
    kernels.context.take_bytes()
    decoder.logits(decoder.forward(torch.arange(rows), batch, arena))
    needed = weight_bytes(spec, torch.bfloat16, int8=int8, bf12=kernels.bf12) + rows * live_kv_bytes(spec, context)
    assert 0.95 * needed < kernels.context.take_bytes() < 1.1 * needed
