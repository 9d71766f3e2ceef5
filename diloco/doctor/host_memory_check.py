"""Checks that this machine has the host memory that an island's ranks need on it."""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diloco.config.check import list_candidates, model_specs
from diloco.config.schema import IslandConfig, RunConfig
from diloco.doctor.checks import Check
from diloco.errors import ConfigError
from diloco.formatting import human_bytes
from diloco.planning.mesh.host_memory import HostMemory, estimate_host_memory
from diloco.planning.mesh.step_plan import build_step_plan, vocabulary
from diloco.runtime.devices.choice import choose_device
from diloco.runtime.devices.gpus import list_gpus
from diloco.swarm.visit import LocalIsland
from inner.errors import InputError as DataError
from inner.measure.memory import MemoryEstimate
from inner.model.sizes import BYTE_VOCAB_SIZE
from outer.errors import InputError

log = logging.getLogger(__name__)

NEARLY_ALL = 0.85
"""Share of the memory above which the user is warned.

The system, the page cache and datasets need the rest.
"""
MOST_NAMED = 4
"""Number of the largest purposes that a text names."""
CURE = (
    "spread the island over more machines (island.ranks, fewer on each), allow the container or "
    "job more memory, set island.checkpoint.every_rounds to null, or choose a smaller model; "
    "`diloco plan` shows each purpose"
)


@dataclass(frozen=True)
class MachineMemory:
    """Host memory that the processes of this machine may use together."""

    num_bytes: int
    source: str
    """The origin of this limit, as text for the user."""
    swap_bytes: int = 0


@dataclass(frozen=True)
class NodeMemory:
    """The host memory that an island's ranks on one machine need, and the memory that there is."""

    label: str
    num_ranks: int
    """Number of the island's ranks on this machine."""
    rank: HostMemory
    machine: MachineMemory
    smallest_share: float = 1.0
    """Least memory of these ranks, as a share of an average rank's.

    It is below 1 if these ranks may hold the smallest stage.
    """

    @property
    def least(self) -> float:
        """Bytes that the ranks need in any case."""
        return self.num_ranks * self.smallest_share * self.rank.least

    @property
    def cannot_fit(self) -> bool:
        """Whether even the certain needs exceed memory and swap space together."""
        return self.least > self.machine.num_bytes + self.machine.swap_bytes

    @property
    def is_scarce(self) -> bool:
        """Whether the possible needs take nearly all of the memory, or more."""
        return self.num_ranks * self.rank.estimate > NEARLY_ALL * self.machine.num_bytes

    @property
    def text(self) -> str:
        """The needed and the available memory, with the largest purposes, as text."""
        sizes = self.rank.certain | self.rank.possible
        largest = sorted(sizes, key=lambda purpose: -sizes[purpose])[:MOST_NAMED]
        named = ", ".join(f"{human_bytes(sizes[purpose])} {purpose}" for purpose in largest)
        ranks = (
            f"{self.num_ranks} {'rank' if self.num_ranks == 1 else 'ranks'} of {self.label!r} "
            "on one machine"
        )
        estimate = human_bytes(self.num_ranks * self.rank.estimate)
        needed = (
            f"at least {human_bytes(self.least)} of host memory, and {estimate} if all is "
            "needed at once"
        )
        swap = (
            f" and {human_bytes(self.machine.swap_bytes)} of swap"
            if self.machine.swap_bytes
            else ""
        )
        allowed = f"{human_bytes(self.machine.num_bytes)} ({self.machine.source}){swap}"
        return (
            f"{ranks} {'needs' if self.num_ranks == 1 else 'need'} {needed}; there are "
            f"{allowed}; each rank {named}"
        )


def require_host_memory(run: RunConfig, island: IslandConfig, device: str) -> None:
    """Raise ConfigError if the island's ranks on this machine cannot fit; warn if it will be close.

    Every rank of the machine calls it, and the first one warns. Nothing is sent: each rank computes
    the same result.
    """
    node = plan_node_memory(run, island, device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if node.cannot_fit:
        raise ConfigError(f"{node.text}; {CURE}")
    if node.is_scarce and os.environ.get("LOCAL_RANK", "0") == "0":
        log.warning("%s; if they are killed for memory, %s", node.text, CURE)


def check_host_memory(local: LocalIsland) -> Check:
    """Check the host memory for all ranks of the island, or for as many as this machine has
    GPUs.
    """
    run = local.run
    island = local.island
    where = "host memory"
    if run is None:
        machine = find_machine_memory()
        text = (
            f"{human_bytes(machine.num_bytes)} ({machine.source}); --config FILE says whether "
            "it is enough"
        )
        return Check("ok", where, text)
    num_gpus = 0 if island.device == "cpu" else len(list_gpus())
    num_ranks = min(island.ranks, num_gpus or island.ranks)
    try:
        device = choose_device(island.device, 0, num_ranks, num_gpus)
        node = plan_node_memory(run, island, device, num_ranks)
    except (ConfigError, DataError, InputError, OSError) as error:
        return Check("warning", where, f"it cannot be planned: {error}")
    if node.cannot_fit:
        return Check("FAILED", where, f"{node.text}; {CURE}")
    return (
        Check("warning", where, f"{node.text}; {CURE}")
        if node.is_scarce
        else Check("ok", where, node.text)
    )


def plan_node_memory(
    run: RunConfig, island: IslandConfig, device: str, num_ranks: int
) -> NodeMemory:
    """Plan the host memory of `num_ranks` ranks of the island on this machine.

    `device` is where they compute, cpu or cuda:N.
    """
    device_type = device.partition(":")[0]
    if island.auto:
        # Whatever the island chooses, it needs at least as much as the last candidate.
        island = list_candidates(run, island)[-1]
    vocab_size, is_assumed = vocabulary(run)
    # Only a certain shortage is refused, and a tokenizer that has not been read may have byte
    # tokens only.
    specs = model_specs(run, BYTE_VOCAB_SIZE if is_assumed else vocab_size)
    here = island.model_copy(update={"device": device_type})
    inner_step = [] if run.model.name else build_step_plan(run, here).memory
    rank = estimate_host_memory(
        run, island, device_type, specs, run.outer.start_islands, inner_step
    )
    share = 1.0 if num_ranks == island.ranks else _smallest_share(inner_step)
    return NodeMemory(island.label, num_ranks, rank, find_machine_memory(), share)


def _smallest_share(inner_step: list[MemoryEstimate]) -> float:
    """Return the fewest params of a pp coordinate, as a share of the average coordinate's
    params.
    """
    params = [each.params for each in inner_step] or [1]
    return min(params) * len(params) / sum(params)


def find_machine_memory(root: Path = Path("/")) -> MachineMemory:
    """Return the machine's memory, or a lower limit of this process's control groups.

    Containers and jobs set such limits.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    swap = _read_swap_bytes(root)
    limits = [(total, "the machine's"), *_find_cgroup_limits(root)]
    return MachineMemory(*min(limits), swap_bytes=swap)


def _read_swap_bytes(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return 0  # Not Linux.
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("SwapTotal:")), 0)


def _find_cgroup_limits(root: Path) -> Iterator[tuple[int, str]]:
    """Yield the limits of this process's control groups and of their parents, for cgroup v1 and
    v2.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # Not Linux.
    groups = {
        kinds: Path(group.lstrip("/")) for _, kinds, group in (line.split(":", 2) for line in lines)
    }
    mount = root / "sys/fs/cgroup"
    for kinds, folder, name in (
        ("", mount, "memory.max"),
        ("memory", mount / "memory", "memory.limit_in_bytes"),
    ):
        # In a container the path may be the host's: then only the top group exists here.
        for group in [groups[kinds], *groups[kinds].parents] if kinds in groups else ():
            try:
                yield (
                    int((folder / group / name).read_text()),
                    f"the limit in {folder / group / name}",
                )
            except (OSError, ValueError):
                continue  # There is no such file, or it contains "max".
