"""How the memory of a device is divided between weights, work space and KV, decided before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from server.cache.kv_cache import KVCache
from server.config import CacheConfig, KVLayout, SchedulerConfig
from server.errors import StartupError
from server.model.checkpoint import Checkpoint
from server.model.kv_layout import choose_slab_bytes, page_byte_sizes
from server.model.native_work_space import native_step_bytes
from server.model.spec import DenseSpec, ModelSpec
from server.model.weights import weight_bytes
from server.step import PageKind

MAX_CPU_KV_BYTES = 4 * 2**30
"""Unless told otherwise, KV on a CPU takes no more than this: the memory is the user's, not ours."""

MIN_CONTEXT_TOKENS = 512
"""A server whose longest request is shorter than this is of no use unless somebody asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """layout is how KV memory is cut. context_tokens is what one request can use: the model's limit or the arena's.
    full_context_sequences of that length fit at once, short_sequences of short_tokens, while one of them is computed in
    chunks and the others decode."""

    device: str
    dtype: str
    available_bytes: int
    weight_bytes: int
    work_bytes: int
    layout: KVLayout
    context_tokens: int
    full_context_sequences: int
    short_sequences: int
    short_tokens: int

    @property
    def kv_bytes(self) -> int:
        return self.layout.slab_bytes * self.layout.slab_count

    def table(self, name: str) -> str:
        """What the operator reads at start."""
        layout = self.layout
        window = (
            f"{_size(layout.window_page_bytes)} a page, window of {layout.window_tokens + 1} keys"
            if layout.has_window
            else "none: every layer is full attention"
        )
        rows = [
            ("model", f"{name} ({self.dtype} on {self.device})"),
            ("memory available", _size(self.available_bytes)),
            ("weights", _size(self.weight_bytes)),
            ("work space", _size(self.work_bytes)),
            ("KV arena", f"{_size(self.kv_bytes)} in {layout.slab_count:,} slabs of {_size(layout.slab_bytes)}"),
            ("full layers", f"{_size(layout.full_page_bytes)} a page of {layout.page_tokens} tokens"),
            ("window layers", window),
            ("longest request", f"{self.context_tokens:,} tokens"),
            ("fits at once", f"{self.full_context_sequences:,} requests of {self.context_tokens:,} tokens"),
            ("", f"{self.short_sequences:,} requests of {self.short_tokens:,} tokens"),
        ]
        return "\n".join(f"  {label:<17} {value}" for label, value in rows)


def available_bytes(device: torch.device, group: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can still be taken: of the GPU, or of this machine and the control group (version 2) it runs in.

    A group's use includes files that were read: what of them nobody used again (inactive_file) the kernel gives up
    before it refuses memory, so weights that were just downloaded do not count.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    limit, used = _read_number(group / "memory.max"), _read_number(group / "memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used + _read_statistic(group / "memory.stat", "inactive_file")))
    return free


def plan_memory(
    spec: ModelSpec,
    *,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    max_model_tokens: int | None,
    dtype: torch.dtype,
    device: torch.device,
    available: int,
    packed: bool = False,
    panels: bool = False,
    int8: bool = False,
    bf12: bool = False,
    gathers: bool = True,
    native_threads: int | None = None,
    checkpoint: Checkpoint | None = None,
) -> MemoryPlan:
    """Divide `available` bytes. packed, panels, int8, bf12: how the backend keeps matrices, see `weight_bytes`.
    gathers: whether it copies keys and values out of their pages to attend to them. native_threads: of the C kernels,
    where they run the steps.

    Raises StartupError with the numbers and the flag that helps if it is too little.
    """
    context = _context_tokens(spec, max_model_tokens)
    full_page, window_page = page_byte_sizes(spec, cache.page_tokens, dtype)
    slab = choose_slab_bytes(full_page, window_page)
    weights = weight_bytes(spec, dtype, packed=packed, panels=panels, int8=int8, bf12=bf12, checkpoint=checkpoint)
    if native_threads is None:
        step = _step_bytes(spec, scheduler)
    else:
        tokens = scheduler.step_token_budget
        rows = min(scheduler.max_sequences, tokens)
        step = native_step_bytes(spec, tokens=tokens, rows=rows, context_tokens=context, threads=native_threads)
    fixed = step + _logit_bytes(spec, scheduler) + _table_bytes(context, cache, scheduler)
    gathered = _gather_share(spec, dtype) if gathers else 0.0

    def layout(slabs: int) -> KVLayout:
        return KVLayout(
            page_tokens=cache.page_tokens,
            window_tokens=spec.window_tokens if window_page else 0,
            full_page_bytes=full_page,
            window_page_bytes=window_page,
            slab_bytes=slab,
            slab_count=slabs,
        )

    chunk = min(scheduler.prefill_chunk_tokens, scheduler.step_token_budget)
    alone = _slabs_for(layout(0), context, chunk)
    if cache.kv_bytes is not None:
        wanted = cache.kv_bytes // slab
        work = fixed + int(gathered * wanted * slab)
        if wanted * slab > available - weights - work:
            raise StartupError(
                f"too little memory: --kv-cache-memory-bytes asks for {_size(cache.kv_bytes)}, but of "
                f"{_size(available)} available the weights take {_size(weights)} and work space {_size(work)}"
            )
    else:
        most = alone * scheduler.max_sequences
        if device.type == "cpu":
            most = min(most, max(MAX_CPU_KV_BYTES // slab, alone))
        left = int(available * cache.memory_fraction) - weights - fixed
        wanted = max(0, min(int(left / (1 + gathered)) // slab, most))
        work = fixed + int(gathered * wanted * slab)
    usable = KVCache(layout(wanted)).usable_tokens(context, chunk)
    if usable < min(context, max_model_tokens or MIN_CONTEXT_TOKENS):
        raise StartupError(
            f"too little memory: of {_size(available)} available the weights take {_size(weights)} and work space "
            f"{_size(work)}, which leaves {_size(max(0, wanted * slab))} for KV; a request of {context:,} tokens needs "
            f"{_size(alone * slab)}. Lower --max-model-len, raise --kv-cache-memory-bytes or --gpu-memory-utilization, "
            f"or serve a smaller model"
        )
    short = max(1, min(usable, 1024))
    return MemoryPlan(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        available_bytes=available,
        weight_bytes=weights,
        work_bytes=work,
        layout=layout(wanted),
        context_tokens=usable,
        full_context_sequences=_sequences(layout(wanted), usable, chunk, scheduler.max_sequences),
        short_sequences=_sequences(layout(wanted), short, chunk, scheduler.max_sequences),
        short_tokens=short,
    )


def _context_tokens(spec: ModelSpec, max_model_tokens: int | None) -> int:
    if max_model_tokens is None:
        return spec.context_tokens
    if max_model_tokens > spec.context_tokens:
        raise StartupError(
            f"--max-model-len {max_model_tokens:,} is more than the model's own limit of {spec.context_tokens:,} tokens"
        )
    return max_model_tokens


def _slabs_for(layout: KVLayout, tokens: int, chunk_tokens: int) -> int:
    """Slabs that one sequence of so many tokens needs when it is alone."""
    peak = KVCache(layout).peak_demand(tokens, chunk_tokens)
    window = -(-peak.window // layout.window_pages_per_slab) if layout.has_window else 0
    return -(-peak.full // layout.full_pages_per_slab) + window


def _sequences(layout: KVLayout, tokens: int, chunk_tokens: int, most: int) -> int:
    """How many sequences of so many tokens fit at once: one at the peak of its prefill, the others decoding."""
    cache = KVCache(layout)
    demand, decoding = cache.peak_demand(tokens, chunk_tokens), cache.peak_demand(tokens, 1)
    count = 0
    while count < most and cache.fits(demand):
        count += 1
        demand += decoding
    return count


def _step_bytes(spec: ModelSpec, scheduler: SchedulerConfig) -> int:
    """An upper estimate of a step's activations."""
    tokens = scheduler.step_token_budget
    inner = 0
    for layer in spec.layers:
        attention, mlp = layer.attention, layer.mlp
        heads = (attention.heads + attention.kv_heads) * (attention.head_dim + attention.value_dim)
        # Each chosen expert of a token has a row that goes in and one that comes out.
        of_mlp = 3 * mlp.width if isinstance(mlp, DenseSpec) else mlp.active * (3 * mlp.width + 2 * spec.hidden)
        inner = max(inner, of_mlp, 2 * heads)
    return tokens * (inner + 6 * spec.hidden) * 4


def _logit_bytes(spec: ModelSpec, scheduler: SchedulerConfig) -> int:
    """An upper estimate of the fp32 logits with the copies that sampling makes."""
    return min(scheduler.max_sequences, scheduler.step_token_budget) * spec.vocab * 4 * 4


def _table_bytes(context_tokens: int, cache: CacheConfig, scheduler: SchedulerConfig) -> int:
    """The page tables of both kinds: an int32 for each page of each slot."""
    return len(PageKind) * scheduler.max_sequences * -(-context_tokens // cache.page_tokens) * 4


def _gather_share(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Bytes that a step holds for one layer's attention, per byte of KV: the keys and values of all rows gathered and
    padded to at most twice their length, and two copies of fp32 scores."""
    full = [layer.attention for layer in spec.layers if not layer.is_window]
    kept = sum(attention.kv_elements_per_token for attention in full) * dtype.itemsize
    held = [2 * a.kv_elements_per_token * dtype.itemsize + 2 * 4 * a.heads for a in full]
    return max(held) / kept if full else 0.0


def _read_number(path: Path) -> int | None:
    """None if there is no such file, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_statistic(path: Path, name: str) -> int:
    """One entry of a file of "name number" lines, 0 if there is none."""
    try:
        entries = dict(line.split() for line in path.read_text().splitlines())
        return int(entries.get(name, 0))
    except (OSError, ValueError):
        return 0


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
