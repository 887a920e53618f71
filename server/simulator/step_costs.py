"""How long steps take on devices that are not at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.config import SchedulerConfig
from server.scheduler.step_cost import FixedCost, StepCost, StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost:
    """A step takes as long as the slower of reading and computing (Williams et al. 2009, "Roofline"), and what each
    step takes anyway.

    dense_s: to read what every step reads of the weights; experts_s: to read all experts; routed: the part of them that
    one token takes. position_s: to read the K/V of one position; token_s and read_s: to compute a token, and for it one
    position. It learns nothing.
    """

    step_s: float
    dense_s: float
    experts_s: float
    routed: float
    position_s: float
    token_s: float
    read_s: float

    def seconds(self, shape: StepShape) -> float:
        if not shape.tokens:
            return self.step_s
        # Tokens choose independently. All of a row's tokens read its K/V once; a row looks at the mean of positions.
        experts_s = self.experts_s * (1 - (1 - self.routed) ** shape.tokens)
        cached_s = self.position_s * shape.rows * shape.context_reads / shape.tokens
        computing_s = self.token_s * shape.tokens + self.read_s * shape.context_reads
        return self.step_s + max(self.dense_s + experts_s + cached_s, computing_s)

    def note(self, shape: StepShape, seconds: float) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A model on a machine: what its steps cost, and how its scheduler is set. source: where the figures are from."""

    name: str
    cost: StepCost
    scheduler: SchedulerConfig
    source: str
    is_estimate: bool


def _mimo_v2_5_pro_on_8_h200() -> RooflineCost:
    """Nothing of this is measured.

    Sizes are those of the released config: 70 layers, 10 of them full; hidden 6144, 128 heads (192 for q and k, 128 for
    v), 8 KV heads, so q, k, v have 27,136 rows; 69 MoE layers with 384 experts of width 2048, 8 of them for a token;
    one dense layer of width 16,384; 152,576 words. 8-bit weights but for the attention's outputs and the head.

    A device is an H200 of the data sheet: 4.8 TB/s, 989 TFLOP/s in 16 bits and 1979 in 8, without sparsity. Assumed:
    60 % of the bandwidth, 40 % of the arithmetic, and 3 ms a step for launches, two all-reduces a layer and sampling.

    So one token takes 32.8 G multiplications in 8 bits and 7.0 G in 16: 15 us, 68,000 tokens a second; a position that
    it looks at 0.26 ns. All experts are read in 43 ms, the other weights in 1.2 ms; a position's K/V of the
    full layers (51,200 bytes) in 2.2 ns. The weights fill 1.03 of the eight devices' 1.13 TB: larger budgets of KV than
    the rest are memory that this machine does not have.
    """
    devices, bandwidth, flops_16, flops_8 = 8, 0.6 * 4.8e12, 0.4 * 989e12, 0.4 * 1979e12
    layers, full_layers, moe_layers, hidden, heads, experts, chosen = 70, 10, 69, 6144, 128, 384, 8
    qkv, output = layers * 27_136 * hidden, layers * hidden * heads * 128
    dense, head, expert = 3 * hidden * 16_384, 152_576 * hidden, moe_layers * 3 * hidden * 2_048
    attended = 2 * heads * (192 + 128)  # FLOP for one position in one layer
    in_windows = (layers - full_layers) * 129 * attended
    kv_bytes = full_layers * 8 * (192 + 128) * 2
    return RooflineCost(
        step_s=3e-3,
        dense_s=(qkv + dense + 2 * (output + head)) / (devices * bandwidth),
        experts_s=experts * expert / (devices * bandwidth),
        routed=chosen / experts,
        position_s=kv_bytes / (devices * bandwidth),
        token_s=(2 * (qkv + dense + chosen * expert) / flops_8 + (2 * output + in_windows) / flops_16) / devices,
        read_s=full_layers * attended / (devices * flops_16),
    )


SMOLLM2_ON_TWO_CORES = FixedCost(step_s=0.00554, row_s=0.0023, token_s=0.00054, read_s=2.81e-7)
"""SmolLM2-135M in bf16 on two cores of an AMD EPYC, `python -m bench.step_costs --steps 80 --repeats 4`, with nothing
else running: off by 8 % (median) and 20 % (90 % of steps) on 80 steps that it was not fitted to."""

COST_MODELS: Mapping[str, CostModel] = {
    each.name: each
    for each in (
        CostModel(
            name="mimo-v2.5-pro-8gpu",
            cost=_mimo_v2_5_pro_on_8_h200(),
            scheduler=SchedulerConfig(max_sequences=256, step_token_budget=8_192, prefill_chunk_tokens=8_192),
            source="the sizes of MiMo-V2.5-Pro and the data sheet of eight H200",
            is_estimate=True,
        ),
        CostModel(
            name="cpu-smollm2",
            cost=SMOLLM2_ON_TWO_CORES,
            scheduler=SchedulerConfig(),
            source="SmolLM2-135M on two cores of an AMD EPYC",
            is_estimate=False,
        ),
    )
}
