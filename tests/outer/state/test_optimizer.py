"""The outer optimizer equals torch.optim.SGD, and its momentum can be handed over."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from outer.config import OuterOptimizerConfig
from outer.state.optimizer import OuterOptimizer

torch.set_num_threads(1)

SIZES = {0: 1000, 3: 257, 7: 1}
CONFIGS = [
    OuterOptimizerConfig(),
    OuterOptimizerConfig(nesterov=False),
    OuterOptimizerConfig(lr=1.0, momentum=0.0),
]


def random_parts(seed: int) -> dict[int, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return {
        part: torch.from_numpy(rng.standard_normal(n).astype(np.float32))
        for part, n in SIZES.items()
    }


def pseudo_grads(num_steps: int) -> Iterator[dict[int, torch.Tensor]]:
    for step in range(num_steps):
        yield {part: values * 1e-2 for part, values in random_parts(100 + step).items()}


def reference_step(
    p: torch.Tensor, m: torch.Tensor, g: torch.Tensor, config: OuterOptimizerConfig
) -> None:
    """m = mu m + g; p -= lr (g + mu m), each product added in one operation, as torch.optim.SGD
    does.
    """
    # Written as separate products and sums the last bit differs wherever the CPU has fused
    # multiply-add.
    m.mul_(config.momentum).add_(g)
    p.add_(g.add(m, alpha=config.momentum) if config.nesterov else m, alpha=-config.lr)


def assert_equal_parts(left: dict[int, torch.Tensor], right: dict[int, torch.Tensor]) -> None:
    for part in left:
        assert torch.equal(left[part], right[part]), f"part {part}"


@pytest.mark.parametrize("config", CONFIGS)
def test_it_equals_a_written_out_reference_bit_for_bit(config: OuterOptimizerConfig) -> None:
    parts, expected = random_parts(0), random_parts(0)
    momenta = {part: torch.zeros_like(values) for part, values in expected.items()}
    optimizer = OuterOptimizer(parts, config)
    for grads in pseudo_grads(6):
        optimizer.step(grads)
        for part, values in expected.items():
            reference_step(values, momenta[part], grads[part], config)
    assert_equal_parts(parts, expected)


def test_it_equals_the_formula_in_fp64() -> None:
    parts = random_parts(0)
    p = parts[0].numpy().astype(np.float64)
    m = np.zeros_like(p)
    optimizer = OuterOptimizer(parts, OuterOptimizerConfig())
    for grads in pseudo_grads(6):
        optimizer.step(grads)
        m = 0.9 * m + grads[0].numpy()
        p = p - 0.7 * (grads[0].numpy() + 0.9 * m)
    assert np.allclose(parts[0].numpy(), p, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("config", CONFIGS)
def test_it_equals_plain_torch_sgd_bit_for_bit(config: OuterOptimizerConfig) -> None:
    parts = random_parts(0)
    expected = {part: torch.nn.Parameter(values.clone()) for part, values in parts.items()}
    sgd = torch.optim.SGD(
        expected.values(),
        config.lr,
        config.momentum,
        nesterov=config.nesterov and config.momentum > 0,
    )
    optimizer = OuterOptimizer(parts, config)
    for grads in pseudo_grads(6):
        optimizer.step(grads)
        for part, param in expected.items():
            param.grad = grads[part].clone()
        sgd.step()
    assert_equal_parts(parts, {part: param.detach() for part, param in expected.items()})


def test_lr_one_without_momentum_lands_on_the_average() -> None:
    parts = {0: torch.tensor([1.0, 2.0])}
    OuterOptimizer(parts, OuterOptimizerConfig(lr=1.0, momentum=0.0)).step(
        {0: torch.tensor([0.5, -1.0])}
    )
    assert parts[0].tolist() == [0.5, 3.0]


def test_momentum_is_zeros_before_the_first_step() -> None:
    for config in CONFIGS:
        optimizer = OuterOptimizer(random_parts(0), config)
        assert all(
            torch.equal(optimizer.momentum(part), torch.zeros(n)) for part, n in SIZES.items()
        )


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_joiner_continues_bit_for_bit(config: OuterOptimizerConfig, num_steps: int) -> None:
    steps = list(pseudo_grads(6))
    parts = random_parts(0)
    donor = OuterOptimizer(parts, config)
    for grads in steps[:num_steps]:
        donor.step(grads)
    joined = {part: values.clone() for part, values in parts.items()}
    joiner = OuterOptimizer(joined, config)
    for part in SIZES:
        joiner.set_momentum(part, donor.momentum(part).clone())
    for grads in steps[num_steps:]:
        donor.step(grads)
        joiner.step(grads)
    assert_equal_parts(parts, joined)
    for part in SIZES:
        assert torch.equal(donor.momentum(part), joiner.momentum(part))


def test_set_momentum_copies() -> None:
    optimizer = OuterOptimizer(random_parts(0), OuterOptimizerConfig())
    momentum = torch.ones(257)
    optimizer.set_momentum(3, momentum)
    momentum.zero_()
    assert torch.equal(optimizer.momentum(3), torch.ones(257))


def test_parts_without_a_pseudo_gradient_are_left_alone() -> None:
    parts, before = random_parts(0), random_parts(0)
    optimizer = OuterOptimizer(parts, OuterOptimizerConfig())
    first, second = pseudo_grads(2)
    optimizer.step(first)
    after = {part: values.clone() for part, values in parts.items()}
    momentum = optimizer.momentum(0).clone()
    optimizer.step({3: second[3]})
    assert torch.equal(parts[0], after[0]) and torch.equal(optimizer.momentum(0), momentum)
    assert not torch.equal(parts[3], after[3]) and not torch.equal(parts[3], before[3])


def test_the_pseudo_gradient_is_not_changed() -> None:
    parts = random_parts(0)
    (grads,) = pseudo_grads(1)
    before = {part: values.clone() for part, values in grads.items()}
    optimizer = OuterOptimizer(parts, OuterOptimizerConfig())
    optimizer.step(grads)
    assert_equal_parts(grads, before)


def test_a_rank_that_carries_no_part_can_step() -> None:
    OuterOptimizer({}, OuterOptimizerConfig()).step({})


def test_a_pseudo_gradient_of_another_shape_is_refused() -> None:
    optimizer = OuterOptimizer(random_parts(0), OuterOptimizerConfig())
    with pytest.raises(AssertionError, match="part 3"):
        optimizer.step({3: torch.zeros(1)})
