"""One inner step of an island's leader is counted by axis, beside the plan of `diloco mesh`."""

from pathlib import Path

import torch
import torch.distributed as dist

from diloco.config.schema import load_config
from diloco.records.metrics import TrafficRecord
from diloco.runtime.inner_traffic import COUNTED_STEP, InnerTraffic
from inner.mesh import IslandMesh, resolve_degrees
from tests.harness import run_ranks

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
NUMBERS = 1000


def _count(rank: int) -> list[TrafficRecord | None]:
    """The records after each of some steps, of which each sends NUMBERS fp32 numbers along one
    axis.
    """
    config = load_config(CONFIG, [])
    island = config.for_island(0)
    mesh = IslandMesh(resolve_degrees(island.mesh, island.ranks), "cpu")
    traffic = InnerTraffic(config.run, island, "cpu", mesh, is_leader=rank == 0)
    found = []
    for step in range(1, COUNTED_STEP + 2):
        with traffic.counting():
            dist.all_reduce(torch.ones(NUMBERS), group=mesh.world["fsdp"].get_group())
        found.append(traffic.take(step))
    return found


def test_one_step_of_the_leader_is_counted_beside_the_plan() -> None:
    leader, other = run_ranks(_count, 2)
    assert other == [None] * (COUNTED_STEP + 1)
    assert [record is not None for record in leader] == [
        step == COUNTED_STEP for step in range(1, COUNTED_STEP + 2)
    ]
    record = leader[COUNTED_STEP - 1]
    # In a ring of two, each rank sends an all-reduce's input once.
    ((axis, sent),) = record.sent.items()
    assert sent == 4 * NUMBERS and record.planned[axis] > 1_000_000, "the plan is of a whole step"
