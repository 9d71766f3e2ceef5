"""Dropout's masks are equal as integers on every mesh, and training with them is that of one
process.
"""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from inner.model import dropout
from tests.harness import run_ranks
from tests.inner.small import OPTIMIZER, batch, build_trainer, relative_error, share, whole_model
from tests.parity.meshes import BALANCE, MANY_HEADS, MIXTURE, PREDICT, Case, Key, case

STEPS = 2
CASES = [
    case("dp_shard2", recompute="full"),
    *(
        pytest.param(slow, marks=pytest.mark.slow)
        for slow in (
            case("dp_replicate2"),
            case("cp2"),
            case("cp2", MANY_HEADS, context="ulysses"),
            case("tp2"),
            case("tp2", sequence_parallel=False),
            case("cp2 tp2"),
            case("dp_shard2 tp2", recompute="selective"),
            case("pp2"),
            case("pp2", schedule="dualpipev"),
            case("pp2 dp_shard2", schedule="breadth_first"),
            case("pp2 dp_shard2", PREDICT, schedule="zbv", micro_batch=1),
            case("dp_shard2 ep2", MIXTURE),
        )
    ),
]
on_every_mesh = pytest.mark.parametrize("case", CASES, ids=str)
Masks = dict[tuple[int, int], bytes]


@dataclass
class Life:
    """What one rank saw."""

    masks: Masks
    """By key and width: which elements of a row were kept."""
    losses: list[float | None]
    heldout: tuple[float, int]
    final: dict[str, Tensor]


@cache
def lives(key: Key) -> list[Life]:
    return run_ranks(live, key.value.degrees.num_ranks, key.value, timeout_seconds=600)


def of(case: Case) -> list[Life]:
    return lives(Key(repr(case), case))


def live(_: int, case: Case) -> Life:
    config = OPTIMIZER.model_copy(update={"clip_norm": None, "balance": BALANCE, "dropout": 0.25})
    trainer = build_trainer(case.degrees, case.sizes, config, case.parallel, **case.settings)
    heldout = trainer.evaluate(
        [batch(1000)[: trainer.settings.micro_batch]] if trainer.data_rank == 0 else []
    )
    masks: Masks = {}
    draw = dropout.is_kept

    def note(keys_BS: Tensor, dim: int, rate: float) -> Tensor:
        kept_BSD = draw(keys_BS, dim, rate)
        for key, row in zip(keys_BS.flatten().tolist(), kept_BSD.flatten(0, 1), strict=True):
            known = masks.setdefault((key, dim), row.numpy().tobytes())
            assert known == row.numpy().tobytes(), (
                "a backward or a repeated forward must draw the same mask"
            )
        return kept_BSD

    dropout.is_kept = note
    losses = [trainer.step(share(trainer, batch(step))).loss for step in range(STEPS)]
    return Life(masks, losses, heldout, whole_model(trainer.params)[0])


@on_every_mesh
def test_the_ranks_together_draw_the_masks_of_one_process(case: Case) -> None:
    (one,) = of(case.reference)
    together: Masks = {}
    for rank in of(case):
        for key, kept in rank.masks.items():
            assert together.setdefault(key, kept) == kept
    assert len(one.masks) > 0 and together == one.masks


@on_every_mesh
def test_losses_and_weights_are_those_of_one_process(case: Case) -> None:
    (one,) = of(case.reference)
    many = of(case)[0]
    assert many.losses == pytest.approx(one.losses, rel=1e-4)
    assert max(relative_error(many.final[name], one.final[name]) for name in one.final) < 1e-3


@on_every_mesh
def test_an_evaluation_has_no_dropout(case: Case) -> None:
    without = (
        run_ranks(evaluated_without_dropout, 1, case.reference)[0] if case is CASES[0] else None
    )
    (one,) = of(case.reference)
    assert of(case)[0].heldout == pytest.approx(one.heldout, rel=1e-5)
    assert without in (None, one.heldout)


def evaluated_without_dropout(_: int, case: Case) -> tuple[float, int]:
    trainer = build_trainer(case.degrees, case.sizes, OPTIMIZER, case.parallel, **case.settings)
    return trainer.evaluate([batch(1000)[: trainer.settings.micro_batch]])


def test_masks_of_other_steps_are_other_ones() -> None:
    (one,) = of(CASES[0].reference)
    assert len(one.masks) == STEPS * 12 * 16 * (1 + 2 * 4), (
        "each step, sequence, position, and place has a key"
    )
    assert torch.tensor([sum(kept) for kept in one.masks.values()]).float().mean() == pytest.approx(
        0.75 * 32, rel=0.02
    )
