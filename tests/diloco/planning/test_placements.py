"""`diloco mesh --placements`: what it says of each parameter is what the ranks of a real mesh
hold.
"""

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from diloco.config.schema import load_config
from diloco.planning.mesh.placements import show_placements
from diloco.planning.mesh.step_plan import build_step_plan, load_island
from inner.config import ParallelConfig
from inner.dry_run.placements import find_placements
from inner.mesh import Degrees, IslandMesh
from inner.model.sizes import ModelSizes, OwnModel
from inner.parallel.build import Layout, build_stages
from inner.params import local_tensor
from tests.harness import run_ranks
from tests.parity.meshes import LATENT, MIXTURE

FOUR = Path(__file__).parents[3] / "configs/four-dimensions.yaml"
SIZES = ModelSizes(
    dim=32,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    ffn_dim=50,
    vocab_size=61,
    tie_embeddings=True,
)
OWN = OwnModel(name="tests.own.models:GatedConv", options={"num_layers": 2}, vocab_size=61)


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process of its own: torch keeps a process's place on a mesh for
    later meshes.
    """
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, args)


def held_by(
    rank: int, model: ModelSizes | OwnModel, degrees: Degrees, parallel: ParallelConfig
) -> list[tuple]:
    """Name and shard of every parameter of a rank on a real mesh."""
    layout = Layout(
        model, 16, IslandMesh(degrees, "cpu"), parallel, torch.float32, torch.device("cpu")
    )
    params = [pair for stage in build_stages(layout) for pair in stage.named_parameters()]
    return [(name, tuple(local_tensor(param).shape)) for name, param in params]


@pytest.mark.parametrize(
    "model, degrees, schedule",
    [
        (SIZES, Degrees(pp=2, tp=2), "1f1b"),
        (SIZES, Degrees(dp_shard=2, tp=2), "1f1b"),
        (SIZES, Degrees(pp=2, dp_shard=2), "zbv"),
        (MIXTURE, Degrees(pp=2, dp_shard=4), "1f1b"),
        (replace(LATENT, experts=None), Degrees(dp_shard=2, tp=2), "1f1b"),
        (OWN, Degrees(dp_replicate=2, dp_shard=2), "1f1b"),
    ],
    ids=str,
)
def test_the_first_rank_of_each_pp_coordinate_holds_what_is_listed(model, degrees, schedule):
    parallel = ParallelConfig(schedule=schedule)
    placed = apart(find_placements, model, degrees, parallel, 16)
    ranks = run_ranks(held_by, degrees.num_ranks, model, degrees, parallel)
    for pp in range(degrees.pp):
        listed = [(each.name, each.local_shape) for each in placed if each.pp == pp]
        assert listed == ranks[pp * degrees.num_ranks // degrees.pp]


def test_experts_on_ep_are_spread_over_axes_of_their_own():
    placed = apart(find_placements, MIXTURE, Degrees(dp_shard=2, tp=2, ep=2), ParallelConfig(), 16)
    cuts = {each.name: dict(each.cuts) for each in placed}
    others = {"edp": "-", "ep": "-"}
    assert cuts["layers.1.ffn.experts.up_proj.weight"] == {
        "fsdp": "-",
        "tp": "-",
        "edp": "experts",
        "ep": "experts",
    }
    assert cuts["layers.1.ffn.router.weight"] == {"fsdp": "rows", "tp": "whole"} | others
    assert cuts["layers.1.attention.out_proj.weight"] == {"fsdp": "rows", "tp": "columns"} | others


def test_experts_are_spread_whole_over_the_ranks():
    placed = apart(find_placements, MIXTURE, Degrees(dp_shard=4), ParallelConfig(), 16)
    found = {each.name: (each.local_shape, dict(each.cuts)["fsdp"]) for each in placed}
    # The first of four ranks holds two of six experts.
    assert found["layers.1.ffn.experts.up_proj.weight"] == ((2, 24, 32), "experts")
    assert found["layers.1.ffn.router.weight"] == ((2, 32), "rows")


def test_tensor_parallelism_cuts_rows_of_the_first_matrices_and_columns_of_the_second():
    placed = apart(find_placements, SIZES, Degrees(tp=4), ParallelConfig(), 16)
    cuts = {each.name.removeprefix("layers.0."): dict(each.cuts)["tp"] for each in placed}
    assert (
        cuts["embed.weight"]
        == cuts["attention.q_proj.weight"]
        == cuts["ffn.up_proj.weight"]
        == "rows"
    )
    assert cuts["attention.out_proj.weight"] == cuts["ffn.down_proj.weight"] == "columns"
    # There are fewer key-value heads than ranks.
    assert cuts["attention.k_proj.weight"] == cuts["norm.weight"] == "whole"


def shown(width: int) -> str:
    """What the command prints of the placements at a terminal of that width."""
    config, out = load_config(FOUR, []), StringIO()
    island = load_island(config, 0)
    assert show_placements(
        config.run, island, build_step_plan(config.run, island), Console(file=out, width=width)
    )
    assert not dist.is_initialized(), "the group of ranks that do not exist is closed again"
    return out.getvalue()


def test_the_parts_add_up_to_the_memory_of_the_plan():
    config = load_config(FOUR, [])
    island = load_island(config, 0)
    plan = build_step_plan(config.run, island)
    placed = apart(
        find_placements, plan.work.sizes, plan.work.degrees, island.parallel, plan.work.seq_len
    )
    held = [sum(4 * prod(each.local_shape) for each in placed if each.pp == pp) for pp in range(2)]
    assert held == [each.params for each in plan.memory]


def test_the_table_has_layers_that_lie_alike_in_one_row_and_nothing_is_cut_off():
    text = apart(shown, 60)
    assert (
        text.count("attention.out_proj.weight") == 2
        and "0-1" in text
        and "2-3" in text
        and "…" not in text
    )
