"""How long it takes to find a prompt of a million tokens in the prefix tree, once its keys exist.

python bench/prefix_match.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from server.cache.prefix_tree import PrefixTree
from server.step import PageId


def measure(tokens: int, page_tokens: int, branches: int, rounds: int) -> tuple[float, float]:
    """Seconds of the match and of making the keys, medians. The path has been split where others branch off."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 150_000, tokens)
    keys = prompt.reshape(-1, page_tokens)
    tree = PrefixTree(0)
    tree.extend(tree.root(), keys, list(map(PageId, range(len(keys)))), may_grow=False)
    for number in range(branches):
        at = (number + 1) * len(keys) // (branches + 1)
        other = np.concatenate((keys[:at], keys[:1] + 1 + number))
        known = tree.match(tree.root(), other)
        node = tree.cut(known.node, known.pages)
        tree.extend(node, other[known.pages :], [PageId(len(keys) + number)], may_grow=False)
    matches, makes = [], []
    as_tuple = tuple(prompt.tolist())
    for _ in range(rounds):
        started = time.perf_counter()
        made = np.array(as_tuple, dtype=np.int64).reshape(-1, page_tokens)
        makes.append(time.perf_counter() - started)
        started = time.perf_counter()
        found = tree.match(tree.root(), made)
        matches.append(time.perf_counter() - started)
        assert found.pages == len(keys)
    return statistics.median(matches), statistics.median(makes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_048_576, help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="default %(default)s")
    wanted = parser.parse_args()
    print("| page | branches | match | keys |\n|---|---|---|---|")
    for page_tokens in (16, 64):
        for branches in (0, 100):
            match_s, keys_s = measure(wanted.tokens, page_tokens, branches, wanted.rounds)
            print(f"| {page_tokens} tokens | {branches} | {1e3 * match_s:.2f} ms | {1e3 * keys_s:.1f} ms |", flush=True)


if __name__ == "__main__":
    main()
