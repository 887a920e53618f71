"""The small kernels against their plain definitions."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.interface import PagedKV, WriteIndex
from kernels.reference import ReferenceKernels, experts, gated, rms_norm, rope, route


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_computed_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = (100 * torch.randn(5, 3, 64)).to(dtype), torch.randn(3, 64)
    values = x.double()
    expected = values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    result = rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected.to(dtype), atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_rope_turns_pairs_half_a_rotary_dimension_apart_and_leaves_the_rest() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 2, 10)
    angle = torch.randn(4, 1, 3)
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
    turned = x.clone()
    rope(turned, cos, sin)
    for pair in range(3):
        plane = torch.complex(x[..., pair], x[..., pair + 3]) * torch.exp(1j * angle[..., pair])
        torch.testing.assert_close(turned[..., pair], plane.real)
        torch.testing.assert_close(turned[..., pair + 3], plane.imag)
    assert torch.equal(turned[..., 6:], x[..., 6:])


def test_rope_works_on_a_view() -> None:
    buffer = torch.randn(3, 20)
    view = buffer[:, :16].unflatten(1, (2, 8))
    copy = view.clone()
    cos, sin = torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    rope(view, cos, sin)
    rope(copy, cos, sin)
    assert torch.equal(view, copy)


def test_gated_activations() -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    both = torch.cat((gate, up), -1)
    torch.testing.assert_close(gated(both, "silu"), gate / (1 + torch.exp(-gate)) * up)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(gated(both, "gelu_tanh"), 0.5 * gate * (1 + torch.tanh(inner)) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_swiglu_bounds_the_gate_above_and_up_on_both_sides(dtype: torch.dtype) -> None:
    values = torch.tensor([-1e4, -30.0, -7.5, -7.0, -1.0, -0.25, 0.0, 0.5, 3.0, 7.0, 7.5, 30.0, 1e4], dtype=dtype)
    gate, up = (grid.flatten() for grid in torch.meshgrid(values, values, indexing="ij"))
    bounded, linear = gate.double().clamp(max=7), up.double().clamp(-7, 7)
    expected = (linear + 1) * bounded / (1 + torch.exp(-1.702 * bounded))
    result = gated(torch.cat((gate, up))[None], "clamped_swiglu")[0]
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected.to(dtype))


@pytest.mark.parametrize("normalize", [False, True])
def test_the_bias_steers_the_choice_but_not_the_weights(normalize: bool) -> None:
    torch.manual_seed(0)
    x, router = torch.randn(9, 16), torch.randn(6, 16)
    bias = torch.tensor([5.0, 0, 0, 0, -5.0, 0])
    chosen, weights = route(x, router, bias, kind="sigmoid", active=3, normalize=normalize, scale=2.5)
    scores = torch.sigmoid(x @ router.T)
    assert (chosen == 0).any(-1).all()
    assert not (chosen == 4).any()
    for token in range(9):
        best = (scores[token] + bias).topk(3).indices
        assert sorted(chosen[token].tolist()) == sorted(best.tolist())
        expected = scores[token, chosen[token]]
        expected = 2.5 * (expected / expected.sum() if normalize else expected)
        torch.testing.assert_close(weights[token], expected)


def test_a_softmax_router_weighs_the_chosen_by_their_logits_alone() -> None:
    torch.manual_seed(0)
    x, router, bias = torch.randn(9, 16), torch.randn(6, 16), torch.tensor([2.0, 0, 0, 0, -9.0, 0])
    chosen, weights = route(x, router, bias, kind="softmax", active=3, normalize=True, scale=1.0)
    logits = x @ router.T + bias
    for token in range(9):
        assert sorted(chosen[token].tolist()) == sorted(logits[token].topk(3).indices.tolist())
        share = logits[token, chosen[token]].exp()
        torch.testing.assert_close(weights[token], share / share.sum())


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_experts_sum_what_each_token_chose(tokens: int) -> None:
    torch.manual_seed(tokens)
    x, gate_up, down = torch.randn(tokens, 12), torch.randn(7, 10, 12), torch.randn(7, 12, 5)
    chosen = torch.stack([torch.randperm(7)[:3] for _ in range(tokens)])
    weights = torch.rand(tokens, 3)
    expected = torch.zeros(tokens, 12)
    for token in range(tokens):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            inner = gated(gate_up[expert] @ x[token], "silu")
            expected[token] += weight * (down[expert] @ inner)
    torch.testing.assert_close(experts(x, chosen, weights, gate_up, down, "silu"), expected, atol=1e-5, rtol=1e-5)


def test_experts_add_their_own_biases() -> None:
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(5, 12), torch.randn(4, 10, 12), torch.randn(4, 12, 5)
    gate_up_bias, down_bias = torch.randn(4, 10), torch.randn(4, 12)
    chosen, weights = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [1, 3]]), torch.rand(5, 2)
    expected = torch.zeros(5, 12)
    for token in range(5):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            inner = gated(gate_up[expert] @ x[token] + gate_up_bias[expert], "clamped_swiglu")
            expected[token] += weight * (down[expert] @ inner + down_bias[expert])
    result = experts(
        x, chosen, weights, gate_up, down, "clamped_swiglu", gate_up_bias=gate_up_bias, down_bias=down_bias
    )
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_write_kv_touches_nothing_else() -> None:
    kv = PagedKV(k=torch.zeros(3, 2, 2, 4, 6), v=torch.zeros(3, 2, 2, 4, 5))
    index = WriteIndex(slab=torch.tensor([2, 0]), page=torch.tensor([1, 0]), offset=torch.tensor([3, 0]))
    k, v = torch.randn(2, 2, 6), torch.randn(2, 2, 5)
    ReferenceKernels().write_kv(kv, k, v, index)
    assert torch.equal(kv.k[2, 1, :, 3], k[0])
    assert torch.equal(kv.v[0, 0, :, 0], v[1])
    assert int((kv.k != 0).any(-1).sum()) == 4
