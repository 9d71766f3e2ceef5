"""bf16 is used to compute; storage, sums and optimizer steps are fp32."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from inner.mesh import Degrees
from inner.trainer import Trainer
from tests.harness import run_ranks
from tests.inner.small import OPTIMIZER, batch, build_trainer, share

DTYPES = ("float32", "bfloat16")
STEPS = 200


@dataclass
class Kept:
    """The dtypes of the tensors, by kind."""

    params: set[torch.dtype]
    gradients: set[torch.dtype]
    states: set[torch.dtype]
    computed: set[torch.dtype]
    """Dtypes of the activations between blocks."""


def kept(_: int, optimizer: str) -> Kept:
    trainer = build_trainer(
        Degrees(dp_shard=2),
        config=OPTIMIZER.model_copy(update={"name": optimizer}),
        compute_dtype="bfloat16",
    )
    (model,) = trainer.model_parts
    gradients: set[torch.dtype] = set()
    computed: set[torch.dtype] = set()

    def see_gradients(*_: Any) -> None:
        gradients.update(
            local(param.grad).dtype for param in model.parameters() if param.grad is not None
        )

    def see_output(_module: object, _inputs: object, x_BSD: Tensor) -> None:
        computed.add(x_BSD.dtype)

    register_optimizer_step_pre_hook(see_gradients)
    for layer in model.layers.children():
        layer.register_forward_hook(see_output)
    trainer.step(share(trainer, batch(0)))
    params = {local(param).dtype for param in model.parameters()}
    return Kept(params, gradients, {local(value).dtype for value in states(trainer)}, computed)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def states(trainer: Trainer) -> list[Tensor]:
    """Dtypes of optimizer states that have the shape of their parameter."""
    return [
        value
        for optimizer in trainer.optimizers
        for param, state in optimizer.state.items()
        for value in state.values()
        if value.shape == param.shape
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_gradients_and_optimizer_state_are_fp32(optimizer: str) -> None:
    for seen in run_ranks(kept, 2, optimizer):
        assert seen.params == seen.gradients == seen.states == {torch.float32}
        assert seen.computed == {torch.bfloat16}


def losses(_: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for dtype in DTYPES:
        trainer = build_trainer(Degrees(), compute_dtype=dtype, total_steps=STEPS)
        results = [trainer.step(share(trainer, batch(step))) for step in range(STEPS)]
        found[dtype] = [result.loss for result in results if result.loss is not None]
    return found


@pytest.mark.slow
def test_bf16_trains_as_fp32() -> None:
    # Measured 0.05 % apart; with weights rounded to bf16 after each step it is 3.8 %.
    found = run_ranks(losses, 1, timeout_seconds=200)[0]
    fp32, bf16 = (found[dtype] for dtype in DTYPES)
    assert len(fp32) == len(bf16) == STEPS
    first, last_fp32, last_bf16 = fp32[0], sum(fp32[-20:]) / 20, sum(bf16[-20:]) / 20
    assert last_fp32 < first - 1
    assert bf16 != fp32
    assert abs(last_bf16 - last_fp32) < 0.005 * last_fp32
