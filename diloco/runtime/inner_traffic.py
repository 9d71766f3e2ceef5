"""Counts what rank 0 sends inside its island in one inner step, to compare it with the plan of
`diloco mesh`.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from diloco.config.schema import IslandConfig, RunConfig
from diloco.planning.mesh.step_plan import build_step_plan
from diloco.records.best_effort import best_effort
from diloco.records.metrics import TrafficRecord
from inner.dry_run.comm_counter import CommCounter, island_groups
from inner.measure.traffic.expected import TrafficRow, expected_traffic
from inner.mesh import IslandMesh

COUNTED_STEP = 3
"""Which inner step of a process is counted: not one of the first, which compile and fill caches."""


class InnerTraffic:
    """Counts one step of the leader. On other ranks, and in an island of one rank, it counts
    nothing.
    """

    def __init__(
        self,
        run: RunConfig,
        island: IslandConfig,
        device: str,
        mesh: IslandMesh,
        *,
        is_leader: bool,
    ) -> None:
        self._run = run
        self._island = island.model_copy(
            update={"device": "cuda" if device.startswith("cuda") else "cpu"}
        )
        self._mesh = mesh
        self._is_on = is_leader and island.ranks > 1
        self._num_steps = 0
        self._rows: list[TrafficRow] | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is sent in the block, which is one inner step, if it is the step to count."""
        self._num_steps += 1
        if not self._is_on or self._num_steps != COUNTED_STEP:
            yield
            return
        with CommCounter(island_groups(self._mesh), is_strict=False) as counter:
            yield
        self._rows = counter.rows

    def take(self, step: int) -> TrafficRecord | None:
        """Return the record of the step that was just counted; None if it was not counted."""
        if self._rows is None:
            return None
        rows = self._rows
        self._rows = None
        planned: dict[str, int] = {}
        with best_effort("the traffic inside the island is recorded without the plan"):
            work = build_step_plan(self._run, self._island).work
            planned = by_axis(expected_traffic(work, self._mesh.at["pp"]))
        return TrafficRecord(step=step, sent=by_axis(rows), planned=planned)


def by_axis(rows: list[TrafficRow]) -> dict[str, int]:
    """Return the bytes of each axis."""
    sums = Counter[str]()
    for row in rows:
        sums[row.axis] += row.sent_bytes
    return dict(sums)
