"""The next token of each row: a pure function of (logits, seed, choice, position).

Token v at position i gets Gumbel noise from a counter-based hash of (seed, choice, i, v); the sampled token is the
arg-max of filtered, scaled logits plus noise, which is a draw from their softmax (Gumbel-max; Maddison et al., arXiv
1411.0030, section 2). So equal logits give equal text, whatever the batch, and a draft can be judged by equality.

Filters, in this order: penalties and bias, forbidden tokens, temperature, top-k, top-p (over what top-k left), min-p
(relative to the most probable token).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.native.kernels import Draw, NativeKernels
from server.request import SampledToken
from server.step import RowPlan, RowResult, SlotId, SlotOpening

FIRST_CANDIDATES = 1024
"""How many of the most probable tokens are sorted at first for top-p; almost always they hold the wanted mass."""

GREEDY_TEMPERATURE = 1e-5
"""Up to here the best token is taken: noise could only decide exact ties, and dividing by less overflows fp32."""

_NO_TOP_K = 1 << 40
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


@dataclass(slots=True)
class _SlotState:
    """What the sampler remembers of a slot's sequence.

    counts, only if a penalty needs them: how often each token is in the output [N] fp32, and whether it is in prompt or
    output [N] bool, of the tokens at positions before counted_tokens.
    """

    opening: SlotOpening
    stop_ids: Tensor
    bias: tuple[Tensor, Tensor] | None
    counts: tuple[Tensor, Tensor] | None
    counted_tokens: int

    @property
    def plain(self) -> bool:
        """Nothing is reported of its logits, and nothing changes them before the draw."""
        return self.counts is None and self.bias is None and self.opening.sampling.logprobs is None


class Sampler:
    """Owner of the per-slot sampling state. Used on the device thread only."""

    def __init__(self, vocab: int, device: torch.device, native: NativeKernels | None = None) -> None:
        """native, if any, draws in place of torch; what it draws is the same."""
        self._native = native
        self._vocab = vocab
        self._device = device
        self._slots: dict[SlotId, _SlotState] = {}

    def open(self, opening: SlotOpening) -> None:
        """A sequence enters its slot; what the slot remembered is forgotten."""
        params = opening.sampling
        bias = counts = None
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            bias = (self._tensor(ids, torch.int64), self._tensor(values, torch.float32))
        if params.counts_tokens:
            output = self._tensor(opening.output_tokens, torch.int64)
            known = self._tensor((*opening.prompt_tokens, *opening.output_tokens), torch.int64)
            output_counts = torch.bincount(output, minlength=self._vocab).to(torch.float32)
            counts = (output_counts, torch.bincount(known, minlength=self._vocab) > 0)
        self._slots[opening.slot] = _SlotState(
            opening=opening,
            stop_ids=self._tensor(sorted(i for i in opening.stop_token_ids if i < self._vocab), torch.int64),
            bias=bias,
            counts=counts,
            counted_tokens=len(opening.prompt_tokens) + len(opening.output_tokens),
        )

    def sample(self, logits: Tensor, rows: Sequence[RowPlan]) -> list[RowResult]:
        """One token per row. logits [R, N] fp32 belong to the last position of each row; they are overwritten.

        A row whose logits are not finite fails alone. Sampling a row again gives the same token: a sampled token is
        counted when it comes back as the row's input.
        """
        states = [self._slots[row.slot] for row in rows]
        finite = torch.isfinite(logits.amax(dim=-1)).tolist() if self._native is None else None
        reported = {}
        if not all(state.plain for state in states):
            reported = self._log_probabilities(logits, states)
            for row, state in zip(rows, states, strict=True):
                _count_inputs(state, row)
            self._penalize(logits, states)
            self._bias(logits, states)
        if any(row.suppress_stop for row in rows):
            self._suppress_stops(logits, states, rows)
        openings, positions = [s.opening for s in states], [row.stop for row in rows]
        if self._native is None:
            tokens = self._choose(logits, openings, positions).tolist()
        else:
            draws = [_native_draw(opening, at) for opening, at in zip(openings, positions, strict=True)]
            tokens = self._native.choose(logits, draws)
        results = []
        for index, token in enumerate(tokens):
            if token < 0 or (finite is not None and not finite[index]):
                results.append(RowResult(failure="the model produced logits that are not finite"))
            elif index in reported:
                logprobs, best = reported[index]
                sampled = SampledToken(token_id=token, logprob=float(logprobs[token]), top=best)
                results.append(RowResult(token=sampled))
            else:
                results.append(RowResult(token=SampledToken(token_id=token)))
        return results

    # --- inside ---------------------------------------------------------------------------------------------------

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _log_probabilities(
        self, logits: Tensor, states: Sequence[_SlotState]
    ) -> dict[int, tuple[Tensor, tuple[tuple[int, float], ...]]]:
        """Row -> the model's log-probabilities [N] and its best tokens, before anything changes the logits."""
        wanted = [(row, s.opening.sampling.logprobs) for row, s in enumerate(states)]
        counts = {row: count for row, count in wanted if count is not None}
        if not counts:
            return {}
        logprobs = torch.log_softmax(logits[list(counts)], dim=-1)
        values, ids = logprobs.topk(max(1, *counts.values()), dim=-1)
        return {
            row: (logprobs[i], tuple(zip(ids[i, :count].tolist(), values[i, :count].tolist(), strict=True)))
            for i, (row, count) in enumerate(counts.items())
        }

    def _penalize(self, logits: Tensor, states: Sequence[_SlotState]) -> None:
        """Repetition, frequency and presence penalties of the rows that have any, in place. logits [R, N]."""
        counting = [(row, s.opening.sampling, s.counts) for row, s in enumerate(states) if s.counts is not None]
        if not counting:
            return
        rows = [row for row, _, _ in counting]
        repetition, frequency, presence = (
            self._tensor([getattr(params, f"{name}_penalty") for _, params, _ in counting], torch.float32)[:, None]
            for name in ("repetition", "frequency", "presence")
        )
        output = torch.stack([counts[0] for _, _, counts in counting])  # [R', N]
        seen = torch.stack([counts[1] for _, _, counts in counting])
        plain = logits[rows]
        penalized = torch.where(plain > 0, plain / repetition, plain * repetition)
        logits[rows] = torch.where(seen, penalized, plain) - frequency * output - presence * (output > 0)

    def _bias(self, logits: Tensor, states: Sequence[_SlotState]) -> None:
        """Add logit biases, in place."""
        biased = [(row, *s.bias) for row, s in enumerate(states) if s.bias is not None]
        if biased:
            at = self._row_index([(row, ids) for row, ids, _ in biased])
            logits.index_put_(at, torch.cat([values for _, _, values in biased]), accumulate=True)

    def _suppress_stops(self, logits: Tensor, states: Sequence[_SlotState], rows: Sequence[RowPlan]) -> None:
        """Forbid the stop ids of rows that have too few tokens, in place; a row of nothing else keeps them."""
        chosen = [
            (index, state.stop_ids)
            for index, (state, row) in enumerate(zip(states, rows, strict=True))
            if row.suppress_stop and 0 < len(state.stop_ids) < self._vocab
        ]
        if chosen:
            at = self._row_index(chosen)
            logits.index_put_(at, torch.full(at[0].shape, -math.inf, device=self._device))

    def _row_index(self, entries: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
        """Index of logits [R, N] for (row, ids) pairs."""
        rows = torch.cat([torch.full_like(ids, row) for row, ids in entries])
        return rows, torch.cat([ids for _, ids in entries])

    def _choose(self, logits: Tensor, openings: Sequence[SlotOpening], positions: Sequence[int]) -> Tensor:
        """Token ids [R] for adjusted logits [R, N]."""
        chosen = logits.argmax(dim=-1)
        filtered: list[int] = []
        free: list[int] = []
        for row, opening in enumerate(openings):
            params = opening.sampling
            if params.temperature > GREEDY_TEMPERATURE:
                (filtered if params.top_k > 0 or params.top_p < 1 else free).append(row)
        for rows in (filtered, free):
            if not rows:
                continue
            draws = _Draws.of([openings[row] for row in rows], [positions[row] for row in rows], self._device)
            scaled = logits[rows] / draws.temperature
            chosen[rows] = draws.among_most_probable(scaled) if rows is filtered else draws.among_all(scaled)
        return chosen


def _native_draw(opening: SlotOpening, position: int) -> Draw:
    params = opening.sampling
    return Draw(
        temperature=params.temperature if params.temperature > GREEDY_TEMPERATURE else 0.0,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        key=noise_key(params.seed, opening.choice, position) if params.temperature > GREEDY_TEMPERATURE else 0,
    )


def _count_inputs(state: _SlotState, row: RowPlan) -> None:
    """Count the row's tokens that were sampled since the sequence entered its slot, each position once."""
    if state.counts is None:
        return
    output_counts, seen = state.counts
    for token in row.tokens[max(0, state.counted_tokens - row.start) :]:
        output_counts[token] += 1
        seen[token] = True
    state.counted_tokens = max(state.counted_tokens, row.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draws:
    """Parameters of R rows to be drawn, each [R, 1]; top_k holds the vocabulary size or more where there is none."""

    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor

    @classmethod
    def of(cls, openings: Sequence[SlotOpening], positions: Sequence[int], device: torch.device) -> _Draws:
        params = [opening.sampling for opening in openings]
        keys = [
            _signed(noise_key(opening.sampling.seed, opening.choice, position))
            for opening, position in zip(openings, positions, strict=True)
        ]

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        return cls(
            keys=column(keys, torch.int64),
            temperature=column([p.temperature for p in params], torch.float32),
            top_k=column([p.top_k if p.top_k > 0 else _NO_TOP_K for p in params], torch.int64),
            top_p=column([p.top_p if p.top_p < 1 else math.inf for p in params], torch.float32),
            log_min_p=column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], torch.float32),
        )

    def rows(self, chosen: Tensor) -> _Draws:
        return _Draws(
            keys=self.keys[chosen],
            temperature=self.temperature[chosen],
            top_k=self.top_k[chosen],
            top_p=self.top_p[chosen],
            log_min_p=self.log_min_p[chosen],
        )

    def among_all(self, scaled: Tensor) -> Tensor:
        """Draw from scaled logits [R, N] cut by min-p only -> token ids [R]."""
        ids = torch.arange(scaled.shape[-1], device=scaled.device)
        return (self._cut_min_p(scaled) + gumbel_noise(self.keys, ids)).argmax(dim=-1)

    def among_most_probable(self, scaled: Tensor) -> Tensor:
        """Draw from scaled logits [R, N] cut by top-k, top-p and min-p -> token ids [R].

        A full sort of a large vocabulary costs more than a small model, so only FIRST_CANDIDATES are sorted; rows that
        need more are sorted in full. Tokens that tie with the last survivor survive too, so the survivors depend on
        the row alone.
        """
        whole = torch.logsumexp(scaled, dim=-1, keepdim=True)
        vocab = scaled.shape[-1]
        count = min(FIRST_CANDIDATES, vocab)
        values, ids = scaled.topk(count, dim=-1)
        survivors, floors = self._survivors(values, whole)
        tokens = self._draw(survivors, ids)
        if count < vocab:
            # A floor that reaches the last candidate may have ties, or its true place, beyond.
            reaching = (floors <= values[:, -1:]) & torch.isfinite(floors)
            short = reaching.any(dim=-1) | ((self.top_k > count) & (self.top_k < vocab)).squeeze(-1)
            if bool(short.any()):
                values, ids = scaled[short].sort(dim=-1, descending=True)
                draws = self.rows(short)
                tokens[short] = draws._draw(draws._survivors(values, whole[short])[0], ids)
        return tokens

    def _survivors(self, values: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        """values [R, C] sorted from the most probable down -> the same with the losers at -inf, and the floors [R, 2]:
        the least value that survives top-k (-inf without one) and the least that survives top-p as well. whole [R, 1]
        is the log-sum-exp of the entire row."""
        last = values.shape[-1] - 1
        at_top_k = values.gather(-1, (self.top_k - 1).clamp(max=last))
        top_k_floor = torch.where(self.top_k <= last + 1, at_top_k, -math.inf)
        inside = values.masked_fill(values < top_k_floor, -math.inf)
        total = torch.where(top_k_floor == -math.inf, whole, torch.logsumexp(inside, dim=-1, keepdim=True))
        mass = torch.cumsum((inside - total).exp(), dim=-1)
        # How many of the first tokens stay below top_p: the one after them is the one that reaches it.
        reaching = (mass < self.top_p).sum(dim=-1, keepdim=True).clamp(max=last)
        floor = torch.maximum(top_k_floor, values.gather(-1, reaching))
        survivors = self._cut_min_p(values.masked_fill(values < floor, -math.inf))
        return survivors, torch.cat([top_k_floor, floor], dim=-1)

    def _cut_min_p(self, values: Tensor) -> Tensor:
        return values.masked_fill(values < values.amax(dim=-1, keepdim=True) + self.log_min_p, -math.inf)

    def _draw(self, values: Tensor, ids: Tensor) -> Tensor:
        best = (values + gumbel_noise(self.keys, ids)).argmax(dim=-1, keepdim=True)
        return ids.gather(-1, best).squeeze(-1)


# --- noise --------------------------------------------------------------------------------------------------------


def noise_key(seed: int, choice: int, position: int) -> int:
    """A 64-bit key for one draw. Any change of an argument changes every bit of the noise."""
    key = _mix(seed & _MASK64)
    key = _mix(key ^ (choice + _GOLDEN) & _MASK64)
    return _mix((key + (position + 1) * _GOLDEN) & _MASK64)


def gumbel_noise(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise fp32, -log(-log u), for keys [R, 1] int64 and token ids [C] or [R, C].

    -log(u) is computed as -log1p(-v) with v = 1 - u, because large noise, which decides, comes from small v, and a
    float is finest there. v lies in (0, 1). The hash is the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014,
    "Fast splittable pseudorandom number generators") over key + id * golden ratio.
    """
    h = keys + (ids + 1) * _signed(_GOLDEN)
    h = (h ^ _shift_right(h, 30)) * _signed(_MIX_1)
    h = (h ^ _shift_right(h, 27)) * _signed(_MIX_2)
    h = h ^ _shift_right(h, 31)
    v = ((_shift_right(h, 11).to(torch.float32) + 0.5) * 2.0**-53).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def _mix(x: int) -> int:
    x = (x + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK64
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK64
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, whose own shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
