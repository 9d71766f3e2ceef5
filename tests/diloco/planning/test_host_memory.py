"""Memory of a rank on the host: what it holds for certain, and what may come on top."""

from pathlib import Path

import pytest

from diloco.config.check import model_specs
from diloco.config.schema import load_config, parse_config
from diloco.planning.mesh.host_memory import PROCESS_BYTES, HostMemory, estimate_host_memory
from diloco.planning.mesh.step_plan import build_step_plan
from inner.param_spec import ParamSpec
from outer.config import OuterConfig
from outer.cost import FP32_BYTES, memory_bytes
from outer.reduce.reducer import PARTS_IN_FLIGHT

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
MOVING = "slices and parts on their way"
PINNED = "page-locked memory rounded up"


def estimate(device: str, *overrides: str, num_ranks: int = 2) -> HostMemory:
    config = load_config(QUICKSTART, [f"island.ranks={num_ranks}", *overrides])
    island = config.for_island(0).model_copy(update={"device": device})
    memory = build_step_plan(config.run, island).memory
    return estimate_host_memory(config.run, island, device, model_specs(config.run, 260), 2, memory)


def test_on_the_cpu_all_of_an_inner_step_is_on_the_host() -> None:
    config = load_config(QUICKSTART, ["island.ranks=2"])
    island = config.for_island(0).model_copy(update={"device": "cpu"})
    peak = max(each.peak for each in build_step_plan(config.run, island).memory)
    host = estimate("cpu", "island.checkpoint.every_rounds=null")
    held = host.certain["params and optimizer"] + host.certain["gradients"]
    assert held + host.possible["the rest of an inner step"] == pytest.approx(peak)


def test_what_a_gpu_holds_is_not_on_the_host() -> None:
    host = estimate("cuda", "island.checkpoint.every_rounds=null")
    inner = {"params and optimizer", "gradients", "the rest of an inner step"}
    assert not inner & (host.certain | host.possible).keys()


def test_slices_are_copied_to_the_host_from_a_gpu_only() -> None:
    # A rank's share of the slices, and the half of its parts that the other rank holds or gets.
    assert estimate("cuda").possible[MOVING] == 2 * estimate("cpu").possible[MOVING] > 0


def test_page_locked_memory_may_take_twice_what_is_copied_from_a_gpu() -> None:
    without, host, cpu = (
        estimate("cuda", "island.checkpoint.every_rounds=null"),
        estimate("cuda"),
        estimate("cpu"),
    )
    slices = without.possible[PINNED]
    assert slices == cpu.certain["global params"] > 0
    assert host.possible[PINNED] == slices + cpu.certain["params and optimizer"]
    assert PINNED not in cpu.possible


def test_a_checkpoint_is_a_copy_of_what_is_trained_and_averaged() -> None:
    certain = estimate("cpu", "outer.optimizer.momentum=0.9").certain
    state = certain["params and optimizer"] + certain["global params"] + certain["outer momentum"]
    assert certain["a checkpoint that is written"] == state
    # Gradients may be gone when it is written.
    assert "gradients" not in certain


def test_ranks_share_what_they_shard_and_not_what_they_replicate() -> None:
    def held(mesh: str, num_ranks: int) -> float:
        return estimate("cpu", f"island.mesh={mesh}", num_ranks=num_ranks).certain[
            "params and optimizer"
        ]

    assert held("{dp_shard: 2}", 2) == held("{tp: 2}", 2) == held("{}", 1) / 2
    assert held("{dp_replicate: 2, dp_shard: 1}", 2) == held("{}", 1)


def test_an_own_models_parameters_are_counted_and_its_activations_unknown() -> None:
    config = parse_config(
        "model: {name: tests.own.models:GatedConv, options: {dim: 64}}", ["island.ranks=1"]
    )
    specs = model_specs(config.run, 260)
    host = estimate_host_memory(config.run, config.for_island(0), "cpu", specs, 2)
    num_params = sum(rows * cols for rows, cols in (spec.matrix_shape for spec in specs))
    assert host.certain["params and optimizer"] == (FP32_BYTES + 8) * num_params > 0
    assert "the rest of an inner step" not in host.possible
    assert host.least > PROCESS_BYTES + 8 * FP32_BYTES * num_params


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_each_rank_has_as_many_parts_in_flight(num_ranks: int) -> None:
    specs, part = (ParamSpec("w", (1024, 262144)),), 262144
    memory = memory_bytes(
        OuterConfig(part_elements=part), specs, num_islands=2, num_ranks=num_ranks
    )
    # A reducer gets the payload of the other island for every second part.
    assert memory["payloads that arrive"] == FP32_BYTES * part * PARTS_IN_FLIGHT / 2


def test_the_log_of_means_is_no_larger_than_all_means_of_the_run() -> None:
    specs = (ParamSpec("w", (1024, 1024)),)
    runs = [OuterConfig(codec="bf16", rounds=rounds) for rounds in (2, 100)]
    logs = [
        memory_bytes(outer, specs, num_islands=2, num_ranks=1)["means for joiners"]
        for outer in runs
    ]
    assert logs == [2 * 2 * 1024**2, 8 * 1024**2]
