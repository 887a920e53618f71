"""Where turns of a conversation begin in the tokens of its prompt: who comes back, and where, for the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from server.request import PrefixHints
from server.text.control_spellings import unhurried
from server.text.tokenizer import Tokenizer

TURN_STARTS = ("<|im_start|>", "<start_of_turn>", "<|start|>", "<|start_header_id|>")
"""Control tokens that begin a turn, its role behind them: ChatML (MiMo, Qwen, SmolLM), Gemma, gpt-oss, Llama 3."""

CALL_ENDS = ("</tool_call>", "<|call|>", "<|eom_id|>")
"""Tokens that end a call, or an answer that calls: ChatML families, gpt-oss, Llama 3."""

_PIECE = 65_536
"""Ids that are made an array at a time: the interpreter can do other things after each."""


class TurnFinder:
    """Of one model. Immutable, so it may be used from any thread.

    All is found in the tokens: the last turn that begins is the one that the model is asked for, and turns with the
    same token behind their start are by the same role. Several of that role in a row are one turn (gpt-oss begins one
    for each channel).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._starts = _single_ids(tokenizer, TURN_STARTS)
        self._call_ends = frozenset(_single_ids(tokenizer, CALL_ENDS))

    def hints(self, tokens: Sequence[int], check: Callable[[], None] = unhurried) -> PrefixHints:
        """check is called now and then, and may raise to end the work."""
        ids = np.empty(len(tokens), dtype=np.int64)
        for start in range(0, len(tokens), _PIECE):
            check()
            ids[start : start + _PIECE] = tokens[start : start + _PIECE]
        ids.setflags(write=False)
        is_start = np.zeros(len(ids), dtype=np.bool_)
        for each in self._starts:
            is_start |= ids == each
        starts = np.flatnonzero(is_start)
        turn, asked_before = _turns(starts, ids)
        return PrefixHints(
            ids=ids,
            turn_ends=starts[starts > 0],
            turn=turn,
            added_tokens=len(ids) - asked_before,
            call_end_ids=self._call_ends,
        )


def _turns(starts: NDArray[np.int64], ids: NDArray[np.int64]) -> tuple[int, int]:
    """Which turn of its role the last one is, from 1, and where the one before began (0 for the first)."""
    starts = starts[starts + 1 < len(ids)]
    if not len(starts):
        return 1, 0
    asked = ids[starts + 1] == ids[starts[-1] + 1]
    begins = asked & ~np.concatenate(([False], asked[:-1]))
    of_role = starts[begins]
    return len(of_role), int(of_role[-2]) if len(of_role) > 1 else 0


def _single_ids(tokenizer: Tokenizer, spellings: Sequence[str]) -> list[int]:
    """Ids of those that are one token in this vocabulary."""
    encoded = (tokenizer.encode(spelling, parse_special=True, add_bos=False) for spelling in spellings)
    return [ids[0] for ids in encoded if len(ids) == 1]
