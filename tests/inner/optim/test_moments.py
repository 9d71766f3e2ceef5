"""AdamW's moments on any mesh: creating them early changes nothing, and they are read and written
like params.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inner.config import ParallelConfig
from inner.mesh import Degrees
from inner.optim.build import build_optimizers
from inner.optim.moments import KINDS, ParamsAndMoments, hold_within_second, make_states
from inner.params import LocalParams
from tests.harness import run_ranks
from tests.inner.small import (
    OPTIMIZER,
    SIZES,
    batch,
    build_model,
    build_trainer,
    relative_error,
    share,
    snapshot,
    whole_model,
)

STEPS = 3
TIED = replace(SIZES, tie_embeddings=True)
DEEP = replace(TIED, num_layers=4)
ONE = Degrees()
PLAIN, ZBV = ParallelConfig(), ParallelConfig(schedule="zbv")


class Replica:
    """A full model and its AdamW, stepped with gradients that depend on the step only."""

    def __init__(self) -> None:
        self.model = build_model(TIED)
        self.params = LocalParams(self.model, [self.model])
        self.optimizers = build_optimizers(
            [self.model], [spec.name for spec in self.params.specs], OPTIMIZER
        )

    def train(self, steps: range) -> list[Tensor]:
        """Make these steps and return the params."""
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for param in self.model.parameters():
                param.grad = torch.randn(param.shape, generator=generator)
            self.optimizers[0].step()
        return snapshot(self.params)


def trained(steps: int) -> tuple[Replica, ParamsAndMoments]:
    """A model after so many steps, with moments created before the first."""
    replica = Replica()
    moments = ParamsAndMoments(replica.params, replica.optimizers)
    replica.train(range(steps))
    return replica, moments


def test_moments_made_beforehand_change_no_bit_of_training() -> None:
    plain, (replica, _) = Replica(), trained(STEPS)
    plain.train(range(STEPS))
    assert all(map(torch.equal, snapshot(replica.params), snapshot(plain.params)))
    states, lazy = (list(r.optimizers[0].state.values()) for r in (replica, plain))
    assert [state.keys() for state in states] == [state.keys() for state in lazy]
    assert all(
        torch.equal(ours[key], state[key])
        for ours, state in zip(states, lazy, strict=True)
        for key in state
    )


def test_who_takes_moments_and_their_steps_goes_on_as_who_made_them() -> None:
    (donor, theirs), (joiner, ours), (uncounted, others) = trained(STEPS), trained(1), trained(1)
    for index in range(len(theirs.slices)):
        ours.write(index, theirs.read_all([index])[index])
        others.write(index, theirs.read_all([index])[index])
    ours.set_steps({spec.name: STEPS for spec in theirs.specs})
    expected, following = donor.train(range(STEPS, STEPS + 1)), range(STEPS, STEPS + 1)
    assert all(map(torch.equal, joiner.train(following), expected))
    assert not any(map(torch.equal, uncounted.train(following), expected)), "the count matters"


def test_with_no_steps_behind_second_moments_a_parameter_begins_anew() -> None:
    (fresh, _), (other, moments) = trained(0), trained(STEPS)
    for index in range(len(fresh.params.slices)):
        other.params.write(index, fresh.params.read(index))
    moments.set_steps({spec.name: 0 for spec in moments.specs} | {"not.here": 5})
    assert all(map(torch.equal, other.train(range(2)), fresh.train(range(2))))


def test_moments_of_adamw_itself_are_held_by_nothing() -> None:
    replica, moments = trained(STEPS)
    before = [
        state[kind].clone() for state in replica.optimizers[0].state.values() for kind in KINDS
    ]
    moments.set_steps({})
    after = [state[kind] for state in replica.optimizers[0].state.values() for kind in KINDS]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize(
    ("second", "most"), [(0.0, 0.0), (1e-8, 14.54e-4), (1e-4, 14.54e-2), (4.0, 5.0)]
)
def test_a_first_moment_from_elsewhere_is_held_within_the_second_beside_it(
    second: float, most: float
) -> None:
    optimizer = torch.optim.AdamW([param := torch.nn.Parameter(torch.zeros(2))], betas=(0.9, 0.999))
    state = make_states([optimizer])[param]
    state["exp_avg"].copy_(torch.tensor([5.0, -5.0]))
    state["exp_avg_sq"].fill_(second)
    hold_within_second(optimizer)
    assert state["exp_avg"].tolist() == pytest.approx([most, -most], rel=1e-3)


def test_where_no_bound_follows_from_the_decays_nothing_is_held() -> None:
    optimizer = torch.optim.AdamW(
        [param := torch.nn.Parameter(torch.zeros(1))], betas=(0.999, 0.99)
    )
    make_states([optimizer])[param]["exp_avg"].fill_(5.0)
    hold_within_second(optimizer)
    assert optimizer.state[param]["exp_avg"].item() == 5.0


def test_only_adamw_has_moments_to_average() -> None:
    model = build_model()
    with pytest.raises(AssertionError, match="SGD has no such moments"):
        ParamsAndMoments(LocalParams(model, [model]), [torch.optim.SGD(model.parameters())])


def moments_on_a_rank(
    rank: int, degrees: Degrees, parallel: ParallelConfig | None
) -> dict[str, Tensor]:
    """The model's moments after some steps, assembled from all ranks. Written values are read
    back.
    """
    sizes = DEEP if parallel else TIED
    trainer = build_trainer(
        degrees, sizes, parallel=parallel, micro_batch=3 if degrees == ONE else 1
    )
    moments = ParamsAndMoments(trainer.params, trainer.optimizers)
    for step in range(STEPS):
        trainer.step(share(trainer, batch(step)))
    whole = {}
    for kind in KINDS:
        found, holders = whole_model(OneKind(moments, kind))  # pyright: ignore[reportArgumentType]
        assert all(bool((count >= 1).all()) for count in holders.values())
        whole |= {f"{name}@{kind}": values for name, values in found.items()}
    for index, held in enumerate(moments.slices):
        values = torch.rand(held.shape, generator=torch.Generator().manual_seed(index))
        moments.write(index, values)
        assert torch.equal(moments.read_all([index])[index], values)
    trainer.step(share(trainer, batch(STEPS)))
    written = (
        torch.rand(h.shape, generator=torch.Generator().manual_seed(i))
        for i, h in enumerate(moments.slices)
    )
    assert not any(
        torch.equal(moments.read_all([i])[i], values) for i, values in enumerate(written)
    ), "these are live"
    return whole


class OneKind:
    """The moments of one kind under their params' names."""

    def __init__(self, moments: ParamsAndMoments, kind: str) -> None:
        self._moments, self.specs = moments, moments.specs
        self._indices = [
            i for i, held in enumerate(moments.slices) if held.name.endswith(f"@{kind}")
        ]
        self.slices = [
            replace(moments.slices[i], name=moments.slices[i].name.partition("@")[0])
            for i in self._indices
        ]

    def read(self, index: int) -> Tensor:
        number = self._indices[index]
        return self._moments.read_all([number])[number]


@pytest.mark.parametrize(
    "degrees,parallel",
    [
        pytest.param(Degrees(dp_shard=2), None, marks=pytest.mark.slow),
        pytest.param(Degrees(pp=2, tp=2), None, marks=pytest.mark.slow),
        pytest.param(Degrees(pp=2), ZBV, marks=pytest.mark.slow),
        pytest.param(Degrees(dp_replicate=2, cp=2), None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_mesh_has_the_moments_of_one_process(
    degrees: Degrees, parallel: ParallelConfig | None
) -> None:
    expected = run_ranks(moments_on_a_rank, 1, ONE, parallel and PLAIN)[0]
    for found in run_ranks(moments_on_a_rank, degrees.num_ranks, degrees, parallel):
        for name, values in expected.items():
            assert values.abs().max() > 0 and relative_error(found[name], values) < 1e-4, name
