"""ZeRO-1 keeps gathered weights over the micro-batches of a step, and changes no bit."""

from functools import cache

import pytest
import torch
from torch import Tensor

from inner.config import ParallelConfig
from inner.dry_run.comm_counter import CommCounter, island_groups
from inner.mesh import Degrees
from tests.harness import run_ranks
from tests.inner.small import batch, build_trainer, share, snapshot

STEPS = 3
GROUPS = 4
"""The embedding, two blocks, and the last norm with the head."""
MESHES = [
    Degrees(dp_shard=2),
    pytest.param(Degrees(dp_replicate=2, dp_shard=2), marks=pytest.mark.slow),
    pytest.param(Degrees(dp_shard=2, tp=2), marks=pytest.mark.slow),
    pytest.param(Degrees(pp=2, dp_shard=2), marks=pytest.mark.slow),
]
Life = tuple[list[float | None], tuple[float, int], list[Tensor], int]


def live(_: int, degrees: Degrees, parallel: ParallelConfig) -> Life:
    """Losses, a held-out loss between two steps, the last weights, and the number of gathers in the
    last step.
    """
    trainer = build_trainer(degrees, parallel=parallel, micro_batch=1)
    assert trainer.micro_batches_per_step > 1
    losses = [trainer.step(share(trainer, batch(step))).loss for step in range(STEPS - 1)]
    heldout = trainer.evaluate([batch(100)[: trainer.settings.micro_batch]])
    with CommCounter(island_groups(trainer.mesh, has_experts=False)) as counter:
        losses.append(trainer.step(share(trainer, batch(STEPS))).loss)
    gathers = sum(
        row.calls for row in counter.rows if row.axis == "fsdp" and row.op == "all_gather"
    )
    return losses, heldout, snapshot(trainer.params), gathers


@cache
def lives(degrees: Degrees, zero: int) -> list[Life]:
    parallel = ParallelConfig.model_validate({"zero": zero, "accumulate": "whole"})
    return run_ranks(live, degrees.num_ranks, degrees, parallel)


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_losses_and_weights_have_the_bits_of_zero_2(degrees: Degrees) -> None:
    for kept, freed in zip(lives(degrees, 1), lives(degrees, 2), strict=True):
        assert kept[:2] == freed[:2]
        assert all(map(torch.equal, kept[2], freed[2]))


def test_weights_are_gathered_once_per_step() -> None:
    kept, freed = (lives(Degrees(dp_shard=2), zero)[0][3] for zero in (1, 2))
    assert kept == GROUPS
    assert freed >= 2 * GROUPS
