"""Whether an island's ranks fit into a machine's memory is found out before they start."""

from pathlib import Path

import pytest

from diloco.config.check import model_specs
from diloco.config.schema import Config, load_config, parse_config
from diloco.doctor.host_memory_check import (
    MachineMemory,
    NodeMemory,
    check_host_memory,
    find_machine_memory,
    plan_node_memory,
    require_host_memory,
)
from diloco.doctor.machine_checks import state_bytes
from diloco.errors import ConfigError
from diloco.planning.mesh.host_memory import HostMemory
from diloco.swarm.visit import LocalIsland
from inner.measure.param_specs import num_elements

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def load(*overrides: str) -> Config:
    return load_config(QUICKSTART, ["island.device=cpu", *overrides])


def write_cgroup(root: Path, own: str, files: dict[str, str]) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("own", "files"),
    {
        "v2, of a group around": (
            "0::/job/step\n",
            {"job/step/memory.max": "max\n", "job/memory.max": "4096\n"},
        ),
        "v2, in a container": ("0::/../elsewhere\n", {"memory.max": "4096\n"}),
        "v1": ("5:cpu:/a\n9:memory:/a\n", {"memory/a/memory.limit_in_bytes": "4096\n"}),
    }.values(),
)
def test_a_limit_of_the_container_or_job_is_found(
    tmp_path: Path, own: str, files: dict[str, str]
) -> None:
    write_cgroup(tmp_path, own, files)
    found = find_machine_memory(tmp_path)
    assert found.num_bytes == 4096 and "limit" in found.source


def test_without_such_a_limit_the_machines_memory_counts(tmp_path: Path) -> None:
    write_cgroup(tmp_path, "0::/job\n", {"job/memory.max": "max\n"})
    assert find_machine_memory(tmp_path) == find_machine_memory(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("allowed", "cannot_fit", "is_scarce"),
    [(900, True, True), (1000, False, True), (1400, False, True), (2000, False, False)],
)
def test_only_what_is_needed_for_certain_is_refused(
    allowed: int, cannot_fit: bool, is_scarce: bool
) -> None:
    rank = HostMemory({"global params": 250.0}, {"means for joiners": 100.0})
    node = NodeMemory("island-0", 4, rank, MachineMemory(allowed, "the machine's"))
    assert (node.cannot_fit, node.is_scarce) == (cannot_fit, is_scarce)


def test_what_fits_with_swap_space_is_not_refused() -> None:
    rank, machine = (
        HostMemory({"global params": 250.0}, {}),
        MachineMemory(900, "the machine's", swap_bytes=100),
    )
    assert not NodeMemory("island-0", 4, rank, machine).cannot_fit
    assert NodeMemory("island-0", 5, rank, machine).cannot_fit


def test_of_several_machines_one_may_have_the_smallest_stage() -> None:
    config = load(
        "island.ranks=4", "island.mesh={pp: 2}", "island.parallel.layers_per_stage=[1, 3]"
    )
    half, whole = (
        plan_node_memory(config.run, config.for_island(0), "cpu", num_ranks) for num_ranks in (2, 4)
    )
    assert half.rank == whole.rank and half.least < 0.4 * whole.least


def test_an_island_that_cannot_fit_is_refused_before_it_starts() -> None:
    config = load("model.preset=70b", "model.vocab_size=128256", "island.ranks=1")
    text = (
        r"1 rank of 'island-0' on one machine needs at least .* TB .* there are "
        r".*checkpoint.every_rounds"
    )
    with pytest.raises(ConfigError, match=text):
        require_host_memory(config.run, config.for_island(0), "cpu")
    local = LocalIsland(config.run, config.for_island(0), "gloo")
    assert check_host_memory(local).level == "FAILED"


def test_a_small_island_fits() -> None:
    config = load()
    require_host_memory(config.run, config.for_island(0), "cpu")
    assert check_host_memory(LocalIsland(config.run, config.for_island(0), "gloo")).level == "ok"


def test_an_own_model_is_counted_by_its_parameters() -> None:
    config = parse_config("model: {name: tests.own.models:GatedConv, options: {dim: 64}}")
    num_bytes = 4 * num_elements(model_specs(config.run, 260))
    node = plan_node_memory(config.run, config.for_island(0), "cpu", 1)
    assert node.rank.certain["global params"] == num_bytes > 0
    assert state_bytes(config.run) == 2 * num_bytes
