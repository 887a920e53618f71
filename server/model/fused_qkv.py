"""Where q, k and v lie in a fused projection tensor. Loads without torch.

MiMo-V2.5 and V2.5-Pro store `qkv_proj.weight` as it was sharded for training: chunks one below the other, chunk c being
[Q_c | K_c | V_c] with an equal share of the heads each, and fp8 scales tiled chunk by chunk. Tools that write such
checkpoints anew often store plain [Q; K; V]: that is one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.errors import StartupError
from server.model.spec import AttentionSpec

SCALE_ROWS = 128
"""Rows of a matrix that share a scale."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTensor:
    """scale_rows is how many rows its scales have; None for a tensor that has none."""

    name: str
    attention: AttentionSpec
    scale_rows: int | None


def qkv_rows(attention: AttentionSpec) -> dict[str, int]:
    return {
        "q": attention.heads * attention.head_dim,
        "k": attention.kv_heads * attention.head_dim,
        "v": attention.kv_heads * attention.value_dim,
    }


def grid_rows(rows: int, period: int) -> int:
    """Rows of scales of a matrix whose grid of 128 rows starts anew every `period` rows."""
    return rows // period * -(-period // SCALE_ROWS)


def spans(attention: AttentionSpec, chunks: int) -> dict[str, tuple[Span, ...]]:
    """The rows of q, k and v in the fused tensor, in the order of their heads."""
    shares = {part: rows // chunks for part, rows in qkv_rows(attention).items()}
    chunk_rows = sum(shares.values())
    found, offset = {}, 0
    for part, rows in shares.items():
        found[part] = tuple((c * chunk_rows + offset, c * chunk_rows + offset + rows) for c in range(chunks))
        offset += rows
    return found


def choose_chunks(tensors: Sequence[FusedTensor], metadata: Mapping[str, object], kv_heads: int) -> int:
    """How many chunks the fused tensors of a checkpoint have: all alike, since one program wrote them.

    Tried in this order: `tp_size` of the index's metadata, the KV heads of full layers (what Xiaomi's checkpoints
    have), and 1, plain [Q; K; V]. The first that gives every tensor the rows of scales that it has is right. So chunks
    win where nothing tells them from plain rows: in bf16, or where every chunk is a multiple of 128 rows.

    Raises StartupError with the numbers if none does.
    """
    candidates = list(dict.fromkeys(([_tp_size(metadata)] if "tp_size" in metadata else []) + [kv_heads, 1]))
    fitting = [c for c in candidates if all(_divides(c, tensor.attention) for tensor in tensors)]
    for chunks in fitting:
        if all(tensor.scale_rows in (None, _scale_rows(tensor, chunks)) for tensor in tensors):
            return chunks
    named = next(t for t in tensors if t.scale_rows not in (None, _scale_rows(t, fitting[0])))
    expected = ", ".join(f"{_scale_rows(named, c)} for {c} chunk{'s' if c > 1 else ''}" for c in fitting)
    raise StartupError(
        f"tensor {named.name} has {named.scale_rows} rows of scales for its {_rows(named)} rows, expected {expected}, "
        "and the same number of chunks in all layers"
    )


def _rows(tensor: FusedTensor) -> int:
    return sum(qkv_rows(tensor.attention).values())


def _scale_rows(tensor: FusedTensor, chunks: int) -> int:
    return grid_rows(_rows(tensor), _rows(tensor) // chunks)


def _divides(chunks: int, attention: AttentionSpec) -> bool:
    return attention.heads % chunks == 0 and attention.kv_heads % chunks == 0


def _tp_size(metadata: Mapping[str, object]) -> int:
    value = str(metadata["tp_size"])
    if not value.isdecimal() or int(value) < 1:
        raise StartupError(f"the index of weights has tp_size {value[:40]!r}, expected a whole number of at least 1")
    return int(value)
