"""Small traces, written by hand or drawn at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

Row = tuple[float, int, int, int, int, int, float]  # t_s, src, lcp, n, input, output, api_s


def write_trace(
    path: Path,
    rows: Sequence[Row],
    *,
    block_tokens: int = 128,
    stop: str = "tool_use",
    sessions: Sequence[str] | None = None,
    think_s: Sequence[float] | None = None,
) -> Path:
    """One session and no think times, unless told."""
    lines = [f"# block_size={block_tokens}", "t_s,session,kind,src,lcp,n,input,output,api_s,think_s,stop"]
    for index, (t, src, lcp, n, given, output, api_s) in enumerate(rows):
        session = sessions[index] if sessions is not None else "s"
        think = think_s[index] if think_s is not None else -1
        lines.append(f"{t},{session},main,{src},{lcp},{n},{given},{output},{api_s},{think},{stop}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def random_rows(seed: int, count: int = 60) -> list[Row]:
    rng = random.Random(seed)
    rows: list[Row] = []
    for index in range(count):
        src = rng.randrange(index) if index and rng.random() < 0.8 else -1
        lcp = rng.choice([rows[src][3], rng.randint(0, rows[src][3])]) if src >= 0 else 0
        n = lcp + rng.randint(0, 12)
        rows.append((index * 2.0, src, lcp, n, n * 128 + rng.randint(1, 127), rng.randint(1, 300), rng.choice([1, 30])))
    return rows
