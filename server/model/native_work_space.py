"""How much memory the C kernels take for a step, from above and before anything is loaded.

The same sums as `prepare_memory`, `tp_multiply` and `tp_choose` of kernels/native/csrc/api.h, with every matrix counted
as one whose panels are spread to bf16 before they are multiplied.
"""

from __future__ import annotations

from server.model.spec import DenseSpec, ModelSpec

PANEL = 32
QUAD = 4
BLOCK = 64
SEGMENT = 256
QUERY_ROWS = 96
SPLIT_ROWS = 16
PARTIAL_BYTES = 64 << 20
OPS_PER_LAYER = 16
FEW = 2
BUCKETS = 4096
TP_PAD = 64
"""They have the names and values that they have in csrc."""

BYTES_OF_A_BLOCK = 24
"""QueryBlock of csrc/stack.c."""

STACK_BYTES = 64 << 10
"""What a thread touches of its stack."""


def native_step_bytes(spec: ModelSpec, *, tokens: int, rows: int, context_tokens: int, threads: int) -> int:
    """Bytes that stay taken after steps of up to `tokens` tokens in `rows` rows, each of at most `context_tokens`
    positions. The logits and what the sampler makes of them in torch are not among them."""
    asked = [
        *_token_buffers(spec, tokens, rows),
        _partial_bytes(spec, context_tokens, threads),
        _product_bytes(spec, rows, threads),
        *[_thread_bytes(spec)] * threads,
    ]
    groups = {layer.attention.heads // layer.attention.kv_heads for layer in spec.layers}
    operations = (len(spec.layers) * OPS_PER_LAYER + 2) * 2 * TP_PAD
    blocks = len(groups) * (2 * tokens + 64) * BYTES_OF_A_BLOCK
    experts = max((layer.mlp.experts for layer in spec.layers if not isinstance(layer.mlp, DenseSpec)), default=0)
    of_python = tokens * (8 + 2 * spec.hidden) + rows * 2 * spec.hidden  # ids and hidden states
    return sum(map(_grown, asked)) + operations + blocks + 8 * experts + threads * STACK_BYTES + of_python


def _token_buffers(spec: ModelSpec, tokens: int, rows: int) -> list[int]:
    """Buffers that grow with the tokens of a step."""
    hidden = spec.hidden
    qkv = queries = values = inner = two_inner = experts = active = 0
    multiplied = hidden
    for layer in spec.layers:
        attention, mlp = layer.attention, layer.mlp
        chosen = 1 if isinstance(mlp, DenseSpec) else mlp.active
        qkv = max(qkv, attention.heads * attention.head_dim + attention.kv_elements_per_token)
        queries = max(queries, attention.heads * (attention.head_dim + 1))
        values = max(values, attention.heads * attention.value_dim)
        inner = max(inner, chosen * mlp.width)
        if mlp.width % PANEL:  # gate and up are not in panels of their own, so both are written before they are joined
            two_inner = max(two_inner, chosen * 2 * mlp.width)
        multiplied = max(multiplied, attention.heads * attention.value_dim, chosen * (mlp.width + 1))
        if not isinstance(mlp, DenseSpec):
            experts, active = max(experts, mlp.experts), max(active, mlp.active)
    rotary = sum(rope.rotary_dim for rope in {layer.attention.rope for layer in spec.layers})
    each = [
        *[4 * hidden] * 3,  # the residual stream twice, what is added to it
        2 * (multiplied + 1),
        4 * max(1, active),
        4 * max(qkv, two_inner),
        2 * queries,
        4 * values,
        4 * inner,
        4 * rotary,
        *(4, 8),  # row and position
    ]
    if experts:
        each += [4 * hidden, 4 * experts, *[4 * active] * 4, 4 * active * hidden]
    return [*(tokens * count for count in each), rows * 3 * 8, len(spec.layers) * 4]


def _partial_bytes(spec: ModelSpec, context_tokens: int, threads: int) -> int:
    """Segments of keys that several threads attend to for one query, before they are joined."""
    segments, pieces = context_tokens // SEGMENT + 2, 2 * threads
    width = max(_padded(layer.attention.value_dim) for layer in spec.layers)
    return min(segments * pieces * (width + 2) * SPLIT_ROWS * 4, PARTIAL_BYTES)


def _product_bytes(spec: ModelSpec, rows: int, threads: int) -> int:
    """The head's product and the draw share one buffer."""
    product = threads * (_spread_bytes(spec.hidden) + TP_PAD) + rows * (2 * (spec.hidden + 1) + 4) + TP_PAD
    draw = threads * (BUCKETS * 12 + 8 + 8 * spec.vocab + TP_PAD)
    return max(product, draw)


def _thread_bytes(spec: ModelSpec) -> int:
    """One thread's own: a panel spread to bf16, rows of a small step, and the scratch of attention."""
    spread, scratch = _spread_bytes(spec.hidden), 4 * spec.hidden
    for layer in spec.layers:
        attention, padded = layer.attention, _padded(layer.attention.value_dim)
        spread = max(spread, *map(_spread_bytes, (attention.heads * attention.value_dim, layer.mlp.width)))
        scores, keys, values = QUERY_ROWS * BLOCK * 6, (attention.head_dim + 2) * BLOCK * 2, padded * BLOCK * 2
        sums = QUERY_ROWS * (padded * 8 + 16)
        scratch = max(scratch, scores + keys + values + sums + 10 * TP_PAD)
    return spread + FEW * (2 * (spec.hidden + 1) + 8) + scratch + 2 * TP_PAD


def _spread_bytes(inputs: int) -> int:
    """Room for two panels, one of the gate and one beside it."""
    return 2 * 2 * PANEL * (inputs + QUAD)


def _padded(values: int) -> int:
    return -(-values // PANEL) * PANEL


def _grown(count: int) -> int:
    """What `grow` of csrc/common.h takes for so many bytes: a quarter more, in whole pages."""
    count = max(count, TP_PAD)
    return -(-(count + count // 4) // 4096) * 4096
