"""Ranks of one island around a loop of one's own: which of them hold copies, and which only seem
to.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.own_loop.islands import Islands
from diloco.own_loop.model.copies import check_held
from diloco.own_loop.model.island_model import IslandModel, ModelRules
from diloco.own_loop.model.params import trained_params
from diloco.own_loop.model.ranks import find_ranks
from outer.space.ranks import RankGroup
from tests.diloco.own_loop.loops import TOKENS, folder_of, own_config
from tests.harness import run_ranks
from tests.swarm import read_records, swarm


def test_stages_of_equal_names_sharded_over_meshes_of_their_own_are_refused_with_both_ranks(
    tmp_path: Path,
) -> None:
    def work(config: Config, index: int) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        torch.manual_seed(mesh["pp"].get_local_rank())
        stage = fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh["dp"])
        expected = (
            r"ranks 0 and 2 of this island hold the same part of '0\.weight' \(rows 0 to "
            r"2, columns 0 to 4\) with"
        )
        with pytest.raises(
            ConfigError, match=expected + ".* number the layers of a stage as in the whole model"
        ):
            Islands(own_config(config, index), stage)

    with swarm(tmp_path, islands=[{"ranks": 4}]) as made:
        made.start(0, work).finish()


class Stage(nn.Module):
    """Some layers of a model of four, under their names in the whole model."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8) if 0 in numbers else None
        self.layers = nn.ModuleDict()
        for number in numbers:
            torch.manual_seed(number)
            self.layers[str(number)] = nn.Linear(8, 8)
        torch.manual_seed(9)
        self.last = nn.Linear(8, 1) if 3 in numbers else None
        if self.first is not None:
            torch.manual_seed(8)
            self.first.reset_parameters()

    def train_alone(self, step: int) -> None:
        """Change each parameter by the number of the step and its own name, on any layout of the
        layers.
        """
        for name, param in self.named_parameters():
            with torch.no_grad():
                param += (
                    1e-3
                    * (step + 1)
                    * len(name)
                    * (torch.arange(param.shape[0]).view(-1, *[1] * (param.ndim - 1)))
                )


def train_stages(config: Config, index: int) -> tuple[str, list[str]]:
    """Island 0: two ranks with two parts each, layers 0 and 2, and 1 and 3. Island 1: one rank with
    the whole model.
    """
    if config.for_island(index).ranks > 1:
        dist.init_process_group("gloo")
        parts = [Stage([dist.get_rank()]), Stage([dist.get_rank() + 2])]
    else:
        parts = [Stage([0, 1, 2, 3])]
    with Islands(own_config(config, index), parts) as islands:
        while not islands.is_over:
            for part in parts:
                part.train_alone(islands.steps)
            rank, num_ranks = islands.place
            loss = 1.5 if rank == num_ranks - 1 else None
            islands.step(tokens=TOKENS if rank == 0 else 0, loss=loss)
        names = [spec.name for spec in trained_params(parts, find_ranks()).specs]
        return islands.digest, names


def test_an_interleaved_pipeline_and_one_process_end_with_one_digest(tmp_path: Path) -> None:
    with swarm(tmp_path, islands=[{"ranks": 2}, {}]) as made:
        for island in made.start_all(train_stages):
            island.finish()
        (pipeline, names), (whole, same) = (island.result() for island in made.started)
    assert pipeline == whole
    records = read_records(folder_of(made.config, 0) / "metrics.jsonl")
    assert {record["loss"] for record in records if record["kind"] == "step"} == {1.5}, (
        "of the last stage"
    )
    assert names == same == [name for name, _ in Stage([0, 1, 2, 3]).named_parameters()]


def save_and_resume(config: Config, index: int) -> tuple[str, str]:
    """Make a run whole, and again with a save after its first round. Returns both digests."""
    dist.init_process_group("gloo")
    folder = folder_of(config, index).parent / "saved"
    digests = []
    saved = Stage([0, 1, 2, 3]).state_dict()
    for resumes in (False, True):
        stage = Stage([0, 1, 2, 3])
        stage.load_state_dict(saved)
        with Islands(
            own_config(config, index), stage, state=folder if resumes else None
        ) as islands:
            while not islands.is_over:
                stage.train_alone(islands.steps)
                islands.step(tokens=TOKENS)
                if islands.steps == 3 and not resumes:
                    islands.save(folder)
                    saved = {name: value.clone() for name, value in stage.state_dict().items()}
            digests.append(islands.digest)
    dist.barrier()
    if dist.get_rank() == 1:
        (folder / "islands-1.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"rank 1 of this island: .*islands-1\.safetensors does not exist"
    ):
        Islands(own_config(config, index), stage, state=folder)
    return digests[0], digests[1]


def test_an_island_of_two_ranks_goes_on_from_a_saved_folder_or_refuses_it_on_both(
    tmp_path: Path,
) -> None:
    with swarm(tmp_path, islands=[{"ranks": 2}]) as made:
        island = made.start(0, save_and_resume)
        island.finish()
        whole, resumed = island.result()
    assert whole == resumed


SHAPE = (8, 16, 24)
"""Of a stack of experts, whose matrices are sharded by their first dimension or by both."""


def train_experts(
    *placements: Placement,
) -> Callable[[Config, int], tuple[list[torch.Tensor], str]]:
    """The work of an island with AdamW's moments. Returns values and moments, whole, and the
    digest.
    """

    def work(config: Config, index: int) -> tuple[list[torch.Tensor], str]:
        model = nn.Module()
        values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
        if config.for_island(index).ranks > 1:
            dist.init_process_group("gloo")
            values = distribute_tensor(values, init_device_mesh("cpu", (2,)), placements)
        model.experts = nn.Parameter(values)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with Islands(own_config(config, index, moments=[1, 1]), model, adam) as islands:
            while not islands.is_over:
                (model.experts * (1 + index)).square().sum().backward()
                adam.step()
                adam.zero_grad()
                islands.step(tokens=TOKENS if islands.place[0] == 0 else 0)
            digest = islands.digest
        found = [
            model.experts.detach(),
            *(adam.state[model.experts][kind] for kind in ("exp_avg", "exp_avg_sq")),
        ]
        return [each.full_tensor() if isinstance(each, DTensor) else each for each in found], digest

    return work


@pytest.mark.parametrize(
    "placement",
    [
        Shard(1),
        pytest.param(Shard(2), marks=pytest.mark.slow),
        pytest.param(_StridedShard(1, split_factor=4)),
    ],
)
def test_experts_that_are_sharded_inside_agree_with_those_of_one_process(
    tmp_path: Path, placement: Placement
) -> None:
    with swarm(tmp_path, islands=[{"ranks": 2}, {}]) as made:
        for island in made.start_all(train_experts(placement)):
            island.finish()
        (sharded, digest), (whole, same) = (island.result() for island in made.started)
    assert digest == same
    assert all(torch.equal(values, others) for values, others in zip(sharded, whole, strict=True))


def odd_on_a_rank(rank: int) -> None:
    """Each of these is refused on both ranks, with the parameter, the ranks and the cure."""
    mesh = init_device_mesh("cpu", (2,))
    ranks = RankGroup(dist.group.WORLD)

    def refuse(text: str, **params: torch.Tensor) -> None:
        model = nn.ParameterDict({name: nn.Parameter(value) for name, value in params.items()})
        with pytest.raises(ConfigError, match=text):
            IslandModel(ranks, model, None, None, ModelRules())

    whole = torch.arange(16.0).view(4, 4)
    shard = distribute_tensor(whole, mesh, [Shard(0)])
    refuse("ranks 0 and 1 of this island hold 'w' with different shapes", w=torch.zeros(4 + rank))
    mixed = shard if rank == 0 else whole
    overlap = (
        "do not hold 'w' exactly once: it has 16 elements, their slices 24 .*rank 0: rows 0 "
        "to 2, .*; rank 1: rows 0"
    )
    refuse(overlap, w=mixed)
    with pytest.raises(
        ConfigError, match="do not hold 'w' exactly once: it has 16 elements, their slices 8"
    ):
        held = {"w": shard} if rank == 0 else {"v": torch.zeros(1)}
        half = nn.ParameterDict({name: nn.Parameter(value) for name, value in held.items()})
        IslandModel(ranks, half, None, None, ModelRules())
    refuse(
        "rank 1 of this island: the parameter 'w' is on the meta device",
        w=torch.zeros(2, device=["cpu", "meta"][rank]),
    )
    refuse(
        "rank 0 of this island: the parameter 'w' has the shape .*ZeRO-3", w=torch.zeros(4 * rank)
    )
    partial = DTensor.from_local(whole, mesh, [Partial()])
    refuse("'w' is a DTensor of partial sums", w=partial)
    refuse("no parameter of the model requires a gradient")
    frozen = nn.Linear(2, 2).requires_grad_(rank == 0)
    with pytest.raises(
        ConfigError, match="'bias' requires a gradient on rank 0 of this island and none on rank 1"
    ):
        IslandModel(ranks, frozen, None, None, ModelRules())
    with pytest.raises(
        ConfigError, match=r"rank 1 of this island: two parts of the model hold 'weight'"
    ):
        IslandModel(
            ranks, [nn.Linear(1, 1), nn.Linear(1, 1 + rank)][: 1 + rank], None, None, ModelRules()
        )


def test_what_ranks_cannot_average_is_refused_on_each_of_them() -> None:
    run_ranks(odd_on_a_rank, 2)


def test_copies_that_differ_in_one_value_are_refused_wherever_it_is(tmp_path: Path) -> None:
    def work(config: Config, index: int) -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        with torch.no_grad():
            model.weight[16, 16] += dist.get_rank()
        with pytest.raises(
            ConfigError, match="ranks 0 and 1 of this island hold the same part of 'weight'"
        ):
            Islands(own_config(config, index), model)

    with swarm(tmp_path, islands=[{"ranks": 2}]) as made:
        made.start(0, work).finish()


def test_shards_and_their_replicas_are_taken(tmp_path: Path) -> None:
    def work(config: Config, index: int) -> int:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], mesh=mesh)
        params = trained_params(model)
        check_held(find_ranks(), params)
        return len(params.slices)

    with swarm(tmp_path, islands=[{"ranks": 4}]) as made:
        island = made.start(0, work)
        island.finish()
        assert island.result() == 4
