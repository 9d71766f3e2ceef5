"""A mixture of experts computes what its equations say, on one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inner.config import BalanceConfig, ExpertsConfig
from inner.model.balance import RoutedStep, count_tokens, sum_sequence_losses, sum_z_losses
from inner.model.capacity import find_excess
from inner.model.experts import Mixture, mixtures, recording
from inner.model.router import Routing, choose
from inner.model.sizes import ModelSizes
from tests.inner.small import build_model

EXPERTS = ExpertsConfig(
    number=6, per_token=2, dim=24, shared=1, dense_layers=1, scores="sigmoid", scale=1.5
)
SIZES = ModelSizes(
    dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=61, experts=EXPERTS
)
B, S = 3, 8


def mixture(**changes: object) -> Mixture:
    """The mixture of a small model with initial weights, and a router with clear preferences."""
    sizes = SIZES.__class__(**{**vars(SIZES), "experts": EXPERTS.model_copy(update=changes)})
    (found,) = mixtures([build_model(sizes)])
    with torch.no_grad():
        found.router.weight.mul_(25)
    return found


def sequence_loss(routing: Routing, is_input_BS: Tensor) -> Tensor:
    return sum_sequence_losses(routing, is_input_BS, count_tokens(routing, is_input_BS))


def stream(seed: int = 0) -> Tensor:
    return torch.randn(B, S, SIZES.dim, generator=torch.Generator().manual_seed(seed))


def one_by_one(layer: Mixture, x_BSD: Tensor) -> Tensor:
    """The same sum, token by token and expert by expert, with the router's equations written
    out.
    """
    config = layer.config
    experts = layer.experts
    rows = []
    for x_D in x_BSD.flatten(0, 1):
        logits = layer.router.weight @ x_D
        scores = logits.softmax(0) if config.scores == "softmax" else 1 / (1 + (-logits).exp())
        ranked = sorted(
            range(config.number), key=lambda i: (-float(scores[i] + layer.router.bias[i]), i)
        )
        chosen = sorted(ranked[: config.per_token])
        weights = (
            scores[chosen] / (scores[chosen].sum() if config.renormalise else 1) * config.scale
        )
        y_D = torch.zeros_like(x_D)
        for weight, i in zip(weights, chosen, strict=True):
            hidden = F.silu(experts.gate_proj.weight[i] @ x_D) * (experts.up_proj.weight[i] @ x_D)
            y_D = y_D + weight * (experts.down_proj.weight[i] @ hidden)
        rows.append(y_D)
    y_BSD = torch.stack(rows).view_as(x_BSD)
    return y_BSD if layer.shared is None else y_BSD + layer.shared(x_BSD)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scores": "softmax", "renormalise": False},
        {"shared": 0, "per_token": 1},
        {"per_token": 6, "scale": 1.0},
    ],
)
def test_values_and_gradients_are_those_of_a_sum_written_out(changes: dict) -> None:
    layer = mixture(**changes)
    layer.router.bias.copy_(torch.linspace(-0.2, 0.2, 6))
    x = stream().requires_grad_()
    weight = torch.randn(B, S, SIZES.dim, generator=torch.Generator().manual_seed(1))
    params = [x, *layer.parameters()]
    got = torch.autograd.grad((layer(x) * weight).sum(), params)
    expected = torch.autograd.grad((one_by_one(layer, x) * weight).sum(), params)
    torch.testing.assert_close(layer(x), one_by_one(layer, x), rtol=1e-5, atol=1e-6)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


def test_an_expert_that_no_token_chose_has_a_gradient_of_zeros() -> None:
    layer = mixture()
    layer.router.bias[4] = -10.0
    layer(stream()).sum().backward()
    for module in (layer.experts.gate_proj, layer.experts.up_proj, layer.experts.down_proj):
        assert module.weight.grad is not None
        assert not module.weight.grad[4].any() and module.weight.grad[3].any()


def test_of_equal_values_the_lower_index_is_chosen() -> None:
    config = ExpertsConfig(number=8, per_token=3, dim=8)
    ranks = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 2.0, 0.0], [0.0] * 8])
    assert choose(ranks, config).tolist() == [[1, 3, 5], [0, 1, 2]]


def test_experts_are_chosen_in_the_groups_whose_two_best_add_up_to_most() -> None:
    config = ExpertsConfig(number=8, per_token=2, dim=8, groups=4, kept_groups=2)
    # The best expert of all is in the first group, whose second is bad.
    ranks = torch.tensor([[9.0, -9.0, 4.0, 4.0, 3.0, 3.0, 1.0, 1.0]])
    assert choose(ranks, config).tolist() == [[2, 3]]
    # Only one of the negative values of a kept group is better than those outside.
    ranks = torch.tensor([[-1.0, -5.0, -4.0, -4.0, -9.0, -9.0, -9.0, -9.0]])
    assert choose(ranks, config).tolist() == [[0, 2]]


def test_the_router_stays_in_fp32_beside_a_stream_in_bf16() -> None:
    layer = mixture()
    layer.router.bias.copy_(torch.linspace(-0.2, 0.2, 6))
    x = stream().bfloat16()
    routing = layer.router(x.flatten(0, 1))
    assert {routing.weights_NJ.dtype, routing.logits_NX.dtype} == {torch.float32}
    torch.testing.assert_close(routing.logits_NX, x.flatten(0, 1).float() @ layer.router.weight.T)


def test_the_capacity_of_a_sequence_keeps_the_highest_weights_and_padding_takes_no_place() -> None:
    config = ExpertsConfig(number=2, per_token=1, dim=8, capacity=1.0)
    is_input = torch.tensor([[True, True, True, True, False], [True, True, True, True, True]])
    chosen = torch.tensor([0, 0, 0, 0, 0, 1, 1, 0, 1, 1])[:, None]
    weights = torch.tensor([0.2, 0.9, 0.5, 0.5, 1.0, 0.3, 0.3, 0.9, 0.3, 0.4])[:, None]
    # Two of four tokens may keep expert 0 in the first sequence, three of five expert 1 in the
    # second.
    excess = find_excess(chosen, weights, is_input, config).flatten().tolist()
    assert excess == [True, False, False, True, True, False, False, False, True, False]


def test_what_is_above_the_capacity_adds_nothing_and_is_counted() -> None:
    layer = mixture(capacity=0.5, shared=0)
    step = RoutedStep(BalanceConfig(), torch.tensor(1.0))
    x = stream()
    with recording([layer], step):
        y = layer(x)
    routing = layer.router(x.flatten(0, 1))
    excess = find_excess(
        routing.chosen_NJ, routing.weights_NJ, torch.ones(B, S, dtype=torch.bool), layer.config
    )
    assert 0 < int(step.layers[1].dropped) == int(excess.sum())
    lost = excess.all(dim=1)
    assert (
        lost.any() and not y.flatten(0, 1)[lost].any() and y.flatten(0, 1)[~lost].any(dim=1).all()
    )


def test_the_sequence_loss_is_one_at_balance_and_experts_over_choices_at_collapse() -> None:
    layer = mixture(per_token=1)
    is_input = torch.ones(B, S, dtype=torch.bool)
    routing = layer.router(stream().flatten(0, 1))
    even = routing._replace(
        chosen_NJ=(torch.arange(B * S) % 6)[:, None], scores_NX=torch.full((B * S, 6), 0.3)
    )
    assert float(sequence_loss(even, is_input)) == pytest.approx(B * S, rel=1e-6)
    alone = torch.zeros(B * S, 6)
    alone[:, 2] = 1.0
    collapsed = routing._replace(chosen_NJ=torch.full((B * S, 1), 2), scores_NX=alone)
    assert float(sequence_loss(collapsed, is_input)) == pytest.approx(6 * B * S)


def test_losses_of_the_router_follow_their_equations_and_leave_out_padding() -> None:
    layer = mixture()
    is_input = torch.ones(B, S, dtype=torch.bool)
    is_input[1, 5:] = False
    routing = layer.router(stream().flatten(0, 1))
    expected = 0.0
    for b in range(B):
        tokens = [b * S + s for s in range(S) if is_input[b, s]]
        counts = torch.zeros(6)
        for token in tokens:
            counts[routing.chosen_NJ[token]] += 1
        shares = torch.stack([routing.scores_NX[t] / routing.scores_NX[t].sum() for t in tokens])
        f = 6 / (2 * len(tokens)) * counts
        expected += len(tokens) * float((f * shares.mean(0)).sum())
    assert float(sequence_loss(routing, is_input)) == pytest.approx(expected, rel=1e-5)
    z = routing.logits_NX[is_input.flatten()].exp().sum(1).log().square().sum()
    torch.testing.assert_close(sum_z_losses(routing, is_input), z)


def test_an_injected_loss_has_the_gradient_that_it_would_have_if_it_were_added() -> None:
    layer = mixture()
    balance = BalanceConfig(sequence_loss=0.3, router_z_loss=0.2)
    x = stream().requires_grad_()
    with recording([layer], RoutedStep(balance, torch.tensor(0.1))):
        # A factor of the main loss does not reach the injected ones.
        got = torch.autograd.grad((7.0 * layer(x)).sum(), [x, layer.router.weight])
    routing = layer.router(x.flatten(0, 1))
    is_input = torch.ones(B, S, dtype=torch.bool)
    losses = 0.3 * sequence_loss(routing, is_input) + 0.2 * sum_z_losses(routing, is_input)
    expected = torch.autograd.grad((7.0 * layer(x)).sum() + 0.1 * losses, [x, layer.router.weight])
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_nothing_is_counted_outside_of_a_training_step() -> None:
    layer = mixture()
    step = RoutedStep(BalanceConfig(), torch.tensor(1.0))
    with recording([layer], step):
        layer(stream())
    layer(stream())
    assert int(step.layers[1].counts_X.sum()) == B * S * EXPERTS.per_token
