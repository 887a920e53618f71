"""What `--quantization int8` costs: the same text scored with bf16 weights and with int8 ones.

    python -m bench.int8_loss --models smollm2-135m gemma3-270m

Prints a table; docs/quantization.md explains the columns and holds a run. The torch reference in fp32 is the measure:
bf16's own rounding is in the table too, so that int8's can be held against it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kernels.native.kernels import NativeKernels
from kernels.reference import ReferenceKernels
from server.config import KVLayout, ModelConfig
from server.model.batch import Batch
from server.model.checkpoint import GGUFCheckpoint
from server.model.decoder import Decoder
from server.model.families import spec_from_gguf
from server.model.gguf_file import GGUFFile
from server.model.kv_arena import KVArena
from server.model.kv_layout import choose_slab_bytes, page_byte_sizes
from server.model.native_decoder import NativeDecoder
from server.model.source import resolve
from server.model.spec import ModelSpec
from server.model.weights import load_weights
from server.text.tokenizer import Tokenizer

PAGE_TOKENS = 16
DEFAULT_TEXT = Path(__file__).parent / "data" / "int8_loss.txt"
"""Our architecture page as it was in November 2026: a text of our own that never changes, so that figures compare."""


def log_probabilities(spec: ModelSpec, decoder: Decoder | NativeDecoder, dtype: torch.dtype, tokens: Tensor) -> Tensor:
    """[T, N] fp32 of one sequence, computed as a single chunk."""
    full_bytes, window_bytes = page_byte_sizes(spec, PAGE_TOKENS, dtype)
    layout = KVLayout(
        page_tokens=PAGE_TOKENS,
        window_tokens=spec.window_tokens,
        full_page_bytes=full_bytes,
        window_page_bytes=window_bytes,
        slab_bytes=choose_slab_bytes(full_bytes, window_bytes),
        slab_count=0,
    )
    pages = -(-len(tokens) // PAGE_TOKENS)
    full_slabs = -(-pages // layout.full_pages_per_slab)
    window_slabs = -(-pages // layout.window_pages_per_slab) if layout.has_window else 0
    arena = KVArena(spec, replace(layout, slab_count=full_slabs + window_slabs), dtype)
    full = torch.arange(pages, dtype=torch.int32)[None]
    window = full + full_slabs * layout.window_pages_per_slab if layout.has_window else full
    hidden = decoder.forward(tokens, Batch([(0, 0, len(tokens))], full, window), arena)
    return torch.log_softmax(decoder.logits(hidden), -1)


def row(name: str, ours: Tensor, measure: Tensor, tokens: Tensor) -> str:
    """One line of the table: [T, N] log-probabilities against those of the measure."""
    said = tokens[1:, None]
    own, wanted = ours[:-1].gather(1, said), measure[:-1].gather(1, said)
    difference = (own - wanted).abs().mean().item()
    divergence = (measure.exp() * (measure - ours)).sum(-1)
    perplexity, reference = (math.exp(-chosen.mean().item()) for chosen in (own, wanted))
    agreeing = (ours.argmax(-1) == measure.argmax(-1)).double().mean().item()
    return (
        f"| {name} | {difference:.4f} | {divergence.mean().item():.5f} | {divergence.quantile(0.99).item():.4f} | "
        f"{perplexity:.3f} | {100 * (perplexity / reference - 1):+.2f} % | {100 * agreeing:.1f} % |"
    )


@torch.inference_mode()
def measure_model(model: str, text: str, limit: int) -> None:
    path = resolve(model, cache_folder=ModelConfig().cache_folder).path
    file = GGUFFile(path)
    spec, checkpoint = spec_from_gguf(file), GGUFCheckpoint(file)
    encoded = Tokenizer.from_gguf(file.metadata).encode(text, parse_special=False, add_bos=True)
    tokens = torch.tensor(encoded[:limit])
    cache = Path(ModelConfig().cache_folder).expanduser() / "kernels"

    def reference(dtype: torch.dtype) -> Tensor:
        weights = load_weights(spec, checkpoint, dtype)
        return log_probabilities(spec, Decoder(spec, weights, ReferenceKernels()), dtype, tokens)

    def native(int8: bool) -> Tensor:
        kernels = NativeKernels(cache, int8=int8)
        weights = load_weights(spec, checkpoint, torch.bfloat16, pack=kernels.pack, embeds_from_head=True)
        return log_probabilities(spec, NativeDecoder(spec, weights, kernels), torch.bfloat16, tokens)

    runs: list[tuple[str, Callable[[], Tensor]]] = [
        ("bf16, torch reference", lambda: reference(torch.bfloat16)),
        ("bf16, native", lambda: native(False)),
        ("int8, native", lambda: native(True)),
    ]
    exact = reference(torch.float32)
    print(f"\n{model}, {len(tokens)} tokens, against fp32:\n")
    columns = ["mean abs. diff. of log p", "mean KL", "99 % of KL below", "perplexity", "change", "same best"]
    print(f"| weights and kernels | {' | '.join(columns)} |")
    print(f"|{'---|' * (len(columns) + 1)}")
    print(row("fp32, torch reference", exact, exact, tokens))
    results = {}
    for name, run in runs:
        results[name] = run()
        print(row(name, results[name], exact, tokens))
    print(
        f"\nint8 against bf16, both native:\n\n{row('int8', results['int8, native'], results['bf16, native'], tokens)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"], help="short names of GGUF models")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, help="a file of prose [%(default)s]")
    parser.add_argument("--tokens", type=int, default=1000, help="how many of its first tokens are scored")
    args = parser.parse_args()
    for model in args.models:
        measure_model(model, args.text.read_text(encoding="utf-8"), args.tokens)


if __name__ == "__main__":
    main()
