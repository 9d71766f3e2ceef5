"""Averaged params and moments are Local Adam and DES-LOC (2505.22549), as a few lines of plain
torch have them.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from diloco import island as program
from diloco.assemble import Runtime
from diloco.config.schema import Config
from diloco.train import train
from inner.optim.moments import ParamsAndMoments
from inner.params import LocalParams
from inner.trainer import StepResult
from outer.config import OuterConfig, OuterOptimizerConfig
from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.loop import build_loop
from outer.network.event_loop import EventLoopThread
from outer.space.ranks import RankGroup
from outer.transports.loopback import Hub
from tests.outer.islands import GUARD_SECONDS, attempt, identity_of
from tests.swarm import swarm

torch.set_num_threads(1)

NAMES = "abc"
INNER_STEPS = 4
ROUNDS = 6
STATE = ("exp_avg", "exp_avg_sq")
PACE_SECONDS = 0.3
"""Added to each inner step, so that an island that comes later is there before the run is over."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def make_adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1, fused=True
    )


def inner_step(model: nn.Module, adam: torch.optim.AdamW, island: str, step: int) -> None:
    """On data of the island's own, of another kind on each."""
    generator = torch.Generator().manual_seed(1000 * ord(island) + step)
    inputs = torch.randn(8, 5, generator=generator)
    loss = (model(inputs) - inputs[:, :3].roll(ord(island) % 3, dims=1)).square().mean()
    adam.zero_grad()
    loss.backward()
    adam.step()


Found = list[list[dict[str, Tensor]]]
"""By round, by island: params and moments by name, after the round."""


def by_local_adam(moments: tuple[int, int]) -> Found:
    """The reference: every 4 steps the mean of params, of moments in every n-th round."""
    models = [make_model() for _ in NAMES]
    adams = [make_adam(model) for model in models]
    found = []
    for number in range(ROUNDS):
        for island, model, adam in zip(NAMES, models, adams, strict=True):
            for step in range(INNER_STEPS):
                inner_step(model, adam, island, number * INNER_STEPS + step)
        with torch.no_grad():
            for same in zip(*(model.parameters() for model in models), strict=True):
                averaged = [list(same)]
                states = [adam.state[param] for adam, param in zip(adams, same, strict=True)]
                periods = zip(STATE, moments, strict=True)
                averaged += [
                    [s[kind] for s in states]
                    for kind, period in periods
                    if (number + 1) % period == 0
                ]
                for tensors in averaged:
                    mean = torch.stack(tensors).mean(0)
                    for tensor in tensors:
                        tensor.copy_(mean)
        found.append([held(model, adam) for model, adam in zip(models, adams, strict=True)])
    return found


def held(model: nn.Module, adam: torch.optim.AdamW) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    moments = {
        f"{name}@{kind}": adam.state[param][kind].clone()
        for name, param in named.items()
        for kind in STATE
    }
    return {name: param.detach().clone() for name, param in named.items()} | moments


def by_islands(moments: tuple[int, int]) -> Found:
    """The same by the outer loops of islands that are threads."""
    config = OuterConfig(
        transport="loopback",
        start_islands=len(NAMES),
        wait_seconds=GUARD_SECONDS,
        inner_steps=INNER_STEPS,
        optimizer=OuterOptimizerConfig(lr=1.0, momentum=0.0),
        moments=moments,
        part_elements=256,
    )
    hub = Hub()
    models = [make_model() for _ in NAMES]
    with ThreadPoolExecutor(len(NAMES)) as pool:
        live = [
            pool.submit(life, name, model, config, hub)
            for name, model in zip(NAMES, models, strict=True)
        ]
        by_island = [future.result(GUARD_SECONDS) for future in live]
    return [list(seen) for seen in zip(*by_island, strict=True)]


def life(name: str, model: nn.Module, config: OuterConfig, hub: Hub) -> list[dict[str, Tensor]]:
    """An island's rounds, as diloco/island.py makes them."""
    loop, adam = EventLoopThread(), make_adam(model)
    params = ParamsAndMoments(LocalParams(model, [model]), [adam])
    settings = NetworkSettings(
        run_id="run", island=name, rank=0, hub=hub, connect_seconds=GUARD_SECONDS
    )
    network = loop.run(open_network("loopback", settings), GUARD_SECONDS)
    found = []
    try:
        outer = build_loop(config, identity_of(name), params, RankGroup(), network, loop)
        outer.begin()
        for number in range(ROUNDS):
            for step in range(INNER_STEPS):
                inner_step(model, adam, name, number * INNER_STEPS + step)
            while not attempt(outer, 100).is_committed:
                pass
            params.set_steps(outer.moment_steps(number))
            found.append(held(model, adam))
        return found
    finally:
        loop.run(network.close(), GUARD_SECONDS)
        loop.close()


def differences(ours: Found, theirs: Found) -> Iterator[float]:
    """Relative to the norm, of each tensor."""
    for here, there in zip(ours, theirs, strict=True):
        for mine, plain in zip(here, there, strict=True):
            for name, values in plain.items():
                yield float((mine[name] - values).norm() / values.norm())


@pytest.mark.parametrize("moments", [(1, 1), (3, 6)], ids=["local adam", "des-loc"])
def test_averaged_moments_are_local_adam_in_plain_torch(moments: tuple[int, int]) -> None:
    assert max(differences(by_islands(moments), by_local_adam(moments))) < 1e-6


def test_the_comparison_sees_moments_that_are_not_averaged() -> None:
    assert max(differences(by_islands((1, 1)), by_local_adam((1, 6)))) > 1e-3


# -- the whole program -----------------------------------------------------------------------------

# In the last of 4 rounds, or of 8, both moments are averaged, and local ones are the global ones.
SETTINGS = ["outer.moments=[1, 2]", "optimizer.betas=[0.9, 0.999]"]
Rows = tuple[int, int]


Held = dict[tuple[str, Rows], Tensor]


def train_at_pace(config: Config, index: int) -> tuple[Held, list[set[float]]]:
    """`train_and_return_moments` with inner steps that take at least PACE_SECONDS."""
    return train_and_return_moments(config, index, PACE_SECONDS)


def train_and_return_moments(
    config: Config, index: int, pace: float = 0.0
) -> tuple[Held, list[set[float]]]:
    """Train an island: rank 0's params and moments by name and rows, and what bias correction
    counted before each step.

    The last of these is after all steps. `pace`: seconds added to each inner step.
    """
    found: Held = {}
    counts: list[set[float]] = []

    def live(parts: Runtime) -> None:
        step = parts.trainer.step

        def count() -> None:
            counts.append(
                {float(s["step"]) for opt in parts.trainer.optimizers for s in opt.state.values()}
            )

        def counted(batches: list[Tensor]) -> StepResult:
            count()
            time.sleep(pace)
            return step(batches)

        parts.trainer.step = counted
        program.run(parts)
        count()
        assert parts.participation.moments is not None
        for index, held in enumerate(parts.participation.moments.slices):
            found[held.name, held.rows] = parts.participation.moments.read_all([index])[
                index
            ].clone()

    train(config, index, live)
    return found, counts


def assert_same_where_held(found: Held, whole: Held) -> None:
    by_name = {name: values for (name, _), values in whole.items()}
    assert {name.partition("@")[2] for name in by_name} == {"", *STATE}
    for (name, rows), values in found.items():
        assert torch.equal(values, by_name[name][slice(*rows)]), name
        assert values.any() or rows[0] == rows[1], name


def test_a_sharded_island_and_one_of_a_single_rank_have_the_same_moments(tmp_path) -> None:
    with swarm(
        tmp_path, *SETTINGS, "outer.rounds=4", islands=[{"ranks": 1}, {"ranks": 2}]
    ) as islands:
        single, sharded = islands.start_all(train_and_return_moments)
        single.finish()
        sharded.finish()
        assert all(
            single.committed()[r]["digest"] == sharded.committed()[r]["digest"] for r in range(4)
        )
        (whole, counts), (shard, sharded_counts) = single.result(), sharded.result()
        assert_same_where_held(shard, whole)
        assert not shard.keys() & whole.keys(), "rank 0 holds a part of each"
        assert counts == sharded_counts == [{float(step)} for step in range(9)]


@pytest.mark.slow
@pytest.mark.parametrize("period", [2, 12])
def test_an_island_that_comes_later_counts_the_runs_steps_and_ends_with_the_same_moments(
    tmp_path, period
) -> None:
    settings = [
        "outer.start_islands=2",
        "outer.rounds=12",
        f"outer.moments=[1, {period}]",
        *SETTINGS[1:],
    ]
    with swarm(tmp_path, *settings, islands=[{"ranks": 1}] * 3) as islands:
        first, second = (islands.start(index, train_at_pace) for index in range(2))
        first.wait_for_round(2)
        third = islands.start(2, train_at_pace)
        for island in (first, second, third):
            island.finish()
        assert 11 in third.committed(), "it took no part in the last round"
        (theirs, _), (ours, counts) = first.result(), third.result()
        assert_same_where_held(ours, theirs)
        # Those behind the second moments that it takes: until they have been averaged there are
        # none.
        (at_first,) = counts[0]
        assert at_first == 0 if period == 12 else 4 <= at_first <= 2 * min(third.committed())
        assert at_first % (2 * period) == 0
        assert counts[-1] == {24.0}
