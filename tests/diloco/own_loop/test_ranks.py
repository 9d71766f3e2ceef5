"""Ranks of one island around a loop of one's own: which of them hold copies, and which only seem to."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.own_loop.islands import Islands
from diloco.own_loop.model.copies import check_held
from diloco.own_loop.model.params import trained_params
from diloco.own_loop.model.ranks import find_ranks
from tests.diloco.own_loop.loops import TOKENS, own_config
from tests.swarm import swarm


def test_stages_of_equal_names_sharded_over_meshes_of_their_own_are_refused_with_both_ranks(tmp_path: Path) -> None:
    def work(config: Config, index: int) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        torch.manual_seed(mesh["pp"].get_local_rank())
        stage = fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh["dp"])
        expected = (
            r"ranks 0 and 2 of this island hold the same part of '0\.weight' \(rows 0 to 2, columns 0 to 4\) with"
        )
        with pytest.raises(ConfigError, match=expected + ".* number the layers of a stage as in the whole model"):
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
        """Change each parameter by the number of the step and its own name, on any layout of the layers."""
        for name, param in self.named_parameters():
            with torch.no_grad():
                param += (
                    1e-3 * (step + 1) * len(name) * (torch.arange(param.shape[0]).view(-1, *[1] * (param.ndim - 1)))
                )


def train_stages(config: Config, index: int) -> tuple[str, list[str]]:
    """Island 0: two ranks with two parts each, layers 0 and 2, and 1 and 3. Island 1: one rank with the whole model."""
    if config.for_island(index).ranks > 1:
        dist.init_process_group("gloo")
        parts = [Stage([dist.get_rank()]), Stage([dist.get_rank() + 2])]
    else:
        parts = [Stage([0, 1, 2, 3])]
    with Islands(own_config(config, index), parts) as islands:
        while not islands.is_over:
            for part in parts:
                part.train_alone(islands.steps)
            islands.step(tokens=TOKENS if islands.place[0] == 0 else 0)
        names = [spec.name for spec in trained_params(parts, find_ranks()).specs]
        return islands.digest, names


def test_an_interleaved_pipeline_and_one_process_end_with_one_digest(tmp_path: Path) -> None:
    with swarm(tmp_path, islands=[{"ranks": 2}, {}]) as made:
        for island in made.start_all(train_stages):
            island.finish()
        (pipeline, names), (whole, same) = (island.result() for island in made.started)
    assert pipeline == whole
    assert names == same == [name for name, _ in Stage([0, 1, 2, 3]).named_parameters()]


def test_copies_that_differ_in_one_value_are_refused_wherever_it_is(tmp_path: Path) -> None:
    def work(config: Config, index: int) -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        with torch.no_grad():
            model.weight[16, 16] += dist.get_rank()
        with pytest.raises(ConfigError, match="ranks 0 and 1 of this island hold the same part of 'weight'"):
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
