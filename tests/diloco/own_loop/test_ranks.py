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
from diloco.own_loop.model.copies import check_copies
from diloco.own_loop.model.params import trained_params
from diloco.own_loop.model.ranks import find_ranks
from tests.diloco.own_loop.loops import own_config
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
        with pytest.raises(ConfigError, match=expected + ".* pipeline stages of your own"):
            Islands(own_config(config, index), stage)

    with swarm(tmp_path, islands=[{"ranks": 4}]) as made:
        made.start(0, work).finish()


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
        check_copies(find_ranks(), params)
        return len(params.slices)

    with swarm(tmp_path, islands=[{"ranks": 4}]) as made:
        island = made.start(0, work)
        island.finish()
        assert island.result() == 4
