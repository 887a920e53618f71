"""The network that is trained is the one that is served, and learns what it is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from server.model.spec import AttentionSpec, RopeSpec
from tests.model.dense_reference import mimo_logits
from tests.tiny.dense_mtp import mtp_logits
from tests.tiny.networks import VOCAB, network_of, small_config, split_tensors, unsettle
from tools.train_tiny.attention import attention
from tools.train_tiny.config import PARAMETER_LIMIT, WINDOW, tiny_spec
from tools.train_tiny.experts import ROWS, glu, routed_experts
from tools.train_tiny.export import export
from tools.train_tiny.layers import MoE, RouterLoad, rms_norm
from tools.train_tiny.loss import head_loss
from tools.train_tiny.model import Network
from tools.train_tiny.mtp import given_tokens

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def network() -> Network:
    return unsettle(network_of(small_config()))


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def test_it_has_at_most_six_million_parameters_with_the_largest_vocabulary() -> None:
    assert Network(tiny_spec(1536), seed=0).parameter_count() <= PARAMETER_LIMIT


def test_the_same_seed_is_the_same_start() -> None:
    first, second, other = (network_of(small_config(), seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["layers.1.mlp.gate"], other["layers.1.mlp.gate"])


@torch.no_grad()
def test_logits_equal_the_published_description(network: Network, tmp_path: Path) -> None:
    config = small_config()
    export(network, config, tmp_path)
    tensors = split_tensors(tmp_path, config)
    tokens = random_tokens(2, 5 * WINDOW)
    logits = network.logits(network(tokens))
    for row in range(2):
        expected = mimo_logits(config, tensors, tokens[row], WINDOW + 1)
        assert (logits[row] - expected).abs().max() < TOLERANCE


@torch.no_grad()
def test_drafts_equal_the_published_description(network: Network, tmp_path: Path) -> None:
    """Each layer gets the same hidden of the target, and tokens that are one further on than the layer's before it."""
    config = small_config()
    export(network, config, tmp_path)
    tensors = split_tensors(tmp_path, config)
    tokens = random_tokens(1, 4 * WINDOW)
    hidden = network(tokens)
    drafts = [network.logits(network.draft(k, tokens, hidden))[0] for k in range(3)]
    for k, logits in enumerate(drafts):
        count = tokens.shape[1] - 1 - k
        given = tokens[0, 1 + k :]
        assert torch.equal(given_tokens(tokens, k)[0, :count], given)
        expected = mtp_logits(config, tensors, k, hidden[0, :count], given)
        assert (logits[:count] - expected).abs().max() < TOLERANCE
    in_place = network.logits(network.draft(1, tokens, hidden, layer=0))[0]
    assert (in_place - drafts[1]).abs().max() > 0.1


@torch.no_grad()
def test_later_tokens_and_padding_change_nothing(network: Network) -> None:
    tokens = random_tokens(1, 4 * WINDOW)
    changed = tokens.clone()
    changed[0, 70:] = 0
    one, other = network(tokens), network(changed)
    assert (one - other)[0, :70].abs().max() < 1e-5
    assert (one - other)[0, 70:].abs().max() > 0.1
    for k in range(3):
        seen = 70 - 1 - k
        apart = network.draft(k, tokens, one) - network.draft(k, changed, other)
        assert apart[0, :seen].abs().max() < 1e-5


@torch.no_grad()
def test_a_window_layer_sees_its_window_and_no_further() -> None:
    network = unsettle(network_of(small_config(num_hidden_layers=1, hybrid_layer_pattern=[1], moe_layer_freq=[0])))
    tokens = random_tokens(1, 4 * WINDOW)
    changed = tokens.clone()
    changed[0, 40] = (changed[0, 40] + 1) % VOCAB
    differs = (network(tokens) - network(changed))[0].abs().amax(-1) > 1e-6
    assert differs.nonzero()[:, 0].tolist() == list(range(40, 40 + WINDOW + 1))


@torch.no_grad()
def test_sinks_matter(network: Network) -> None:
    tokens = random_tokens(1, 2 * WINDOW)
    assert network.layers[0].attention.sinks is None
    for layer in (network.layers[1], network.mtp[0].layer):
        sinks = layer.attention.sinks
        outcomes = []
        for shift in (0.0, 2.0):
            sinks += shift
            hidden = network(tokens)
            outcomes.append(network.draft(0, tokens, hidden))
            sinks -= shift
        assert (outcomes[0] - outcomes[1]).abs().max() > 0.01


FULL = AttentionSpec(heads=4, kv_heads=2, head_dim=12, value_dim=6, rope=RopeSpec(theta=100.0, rotary_dim=4), scale=0.3)


@pytest.mark.parametrize(
    "spec",
    [
        FULL,
        replace(FULL, window_keys=9, sinks=True),
        replace(FULL, window_keys=9),
        replace(FULL, kv_heads=4, window_keys=9, sinks=True),
    ],
    ids=["full", "window", "window without sinks", "window without groups"],
)
def test_attention_and_its_gradients_equal_the_plain_definition(spec: AttentionSpec) -> None:
    generator = torch.Generator().manual_seed(0)
    count = 40 if spec.window_keys else 300  # more than one block of queries
    width = spec.heads * spec.head_dim + spec.kv_heads * (spec.head_dim + spec.value_dim)
    qkv = torch.randn(2, count, width, generator=generator, dtype=torch.float64, requires_grad=True)
    sinks = (
        torch.randn(spec.heads, generator=generator, dtype=torch.float64, requires_grad=True) if spec.sinks else None
    )
    angle = torch.randn(count, 1, 2, generator=generator, dtype=torch.float64)
    wanted = torch.randn(2, count, spec.heads * spec.value_dim, generator=generator, dtype=torch.float64)
    leaves = [qkv] if sinks is None else [qkv, sinks]
    found = attention(qkv, sinks, (angle.cos(), angle.sin()), spec)
    expected = plain_attention(qkv, sinks, angle, spec)
    assert (found - expected).abs().max() < 1e-6
    for one, other in zip(
        torch.autograd.grad(found, leaves, wanted), torch.autograd.grad(expected, leaves, wanted), strict=True
    ):
        assert (one - other).abs().max() < 1e-4 * other.abs().max()


def plain_attention(qkv: Tensor, sinks: Tensor | None, angle: Tensor, spec: AttentionSpec) -> Tensor:
    batch, count, _ = qkv.shape
    sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.value_dim]
    q, k, v = (
        part.unflatten(2, (-1, dim))
        for part, dim in zip(qkv.split(sizes, -1), (spec.head_dim, spec.head_dim, spec.value_dim), strict=True)
    )
    q, k = (torch.cat((_turn(x[..., :4], angle), x[..., 4:]), -1) for x in (q, k))
    k, v = (x.repeat_interleave(spec.heads // spec.kv_heads, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * spec.scale
    distance = torch.arange(count)[:, None] - torch.arange(count)
    unseen = (distance < 0) | (distance >= (spec.window_keys or count))
    scores = scores.masked_fill(unseen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(batch, -1, count, 1)), -1)
    shares = scores.softmax(-1)[..., :count]
    return torch.einsum("bhij,bjhd->bihd", shares, v).flatten(2)


def _turn(x: Tensor, angle: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@pytest.mark.parametrize("count", [50, 3 * ROWS])
def test_experts_and_their_gradients_equal_the_plain_definition(count: int) -> None:
    """Three times as many rows as are filled up to, of which one expert gets a whole number."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, requires_grad=True)

    x, gate_up, down, shares = leaf(count, 8), leaf(5, 12, 8), leaf(5, 8, 6), leaf(count, 2)
    chosen = torch.stack([1 + torch.randperm(3, generator=generator)[:2] for _ in range(count)])
    chosen[:ROWS, 0] = 0  # and nobody chooses the last
    found = routed_experts(x, chosen, shares, gate_up, down)
    rows = []
    for token in range(count):
        row = torch.zeros(8)
        for expert, share in zip(chosen[token].tolist(), shares[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            row = row + share * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    expected = torch.stack(rows)
    assert (found - expected).abs().max() < 1e-4
    wanted, leaves = torch.randn(count, 8, generator=generator), [x, shares, gate_up, down]
    for one, other in zip(
        torch.autograd.grad(found, leaves, wanted), torch.autograd.grad(expected, leaves, wanted), strict=True
    ):
        assert (one - other).abs().max() < 1e-3


def test_norm_gate_and_loss_have_the_gradients_of_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, head = (
        torch.randn(shape, generator=generator, requires_grad=True) for shape in ((7, 12), (12,), (20, 6))
    )
    targets, weights = torch.arange(7), torch.rand(7, generator=generator)
    found = head_loss(glu(rms_norm(x, weight, 1e-5)), head, targets, weights)
    gate, up = torch.nn.functional.rms_norm(x, (12,), weight, 1e-5).chunk(2, -1)
    logits = torch.nn.functional.silu(gate) * up @ head.T
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    expected = (losses * weights).sum() / weights.sum()
    assert (found.value - expected).abs() < 1e-5
    assert torch.equal(found.hits, logits.argmax(-1) == targets)
    leaves = [x, weight, head]
    for one, other in zip(torch.autograd.grad(found.value, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert (one - other).abs().max() < 1e-5


@torch.no_grad()
def test_the_correction_bias_evens_the_load() -> None:
    network = unsettle(network_of(small_config()))
    tokens = random_tokens(4, 4 * WINDOW)
    routers = list(network.routers())
    loads = []
    for _ in range(60):
        load = RouterLoad(counted=torch.ones_like(tokens, dtype=torch.bool))
        network(tokens, load=load)
        loads.append(torch.stack(load.tokens).float())
        for router, counts in zip(routers, load.tokens, strict=True):
            router.balance(counts, 0.02)
    assert loads[0].sum() == 5 * 2 * tokens.numel()
    evenness = [(load.mean(-1) / load.amax(-1)).mean() for load in loads]
    assert evenness[0] < 0.7 < 0.85 < evenness[-1]


@torch.no_grad()
def test_the_bias_chooses_and_does_not_weigh() -> None:
    router = next(unsettle(network_of(small_config())).routers())
    assert isinstance(router, MoE)
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(0))
    router.router_bias.zero_()
    router.router_bias[3] = 2.0
    chosen, shares = router.route(x)
    assert (chosen[:, 0] == 3).all()
    scores = (x @ router.router.T).sigmoid().gather(-1, chosen)
    assert torch.allclose(shares, scores / scores.sum(-1, keepdim=True))


@torch.no_grad()
def test_bf16_is_near_fp32(network: Network) -> None:
    tokens = random_tokens(2, 4 * WINDOW)
    exact, rounded = network(tokens), network(tokens, dtype=torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    assert (exact - rounded).abs().median() < 0.05
