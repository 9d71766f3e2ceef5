"""Runs of real islands in which one is killed or frozen at a phase of a round, with checks of the
outcome.
"""

import os
import signal
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from diloco.config.schema import Config
from diloco.faults.spec import parse_fault
from diloco.train import train
from tests.faults.leftovers import nothing_left
from tests.faults.waits import GUARD_SECONDS, assert_one_history, last_round, until
from tests.swarm import Island, Swarm, swarm

ROUND = 3
"""The round in which the fault happens."""
ROUNDS = 24
SLOWNESS = 3
"""Factor on the inner steps of islands that are not to coordinate."""
LOSS_STEP = 0.3
"""Largest rise of this tiny model's held-out loss from one round to the next, in nats per token."""

SHARD2: dict[str, Any] = {"ranks": 2, "mesh": {"dp_shard": 2}, "micro_batch": 2}
PP2_TP2: dict[str, Any] = {
    "ranks": 4,
    "mesh": {"pp": 2, "tp": 2},
    "parallel": {"schedule": "1f1b"},
    "micro_batch": 2,
}
SHAPES = {"dp_shard2": SHARD2, "pp2-tp2": PP2_TP2}
"""Settings of islands of several ranks."""

OVERRIDES = (
    f"outer.rounds={ROUNDS}",
    "outer.inner_steps=4",
    "outer.optimizer.momentum=0.9",
    "outer.codec=int8",
)


STREAMING = (
    f"outer.rounds={ROUNDS // 3}",
    "outer.inner_steps=12",
    "outer.fragments=3",
    "outer.delay=2",
    "outer.codec=int4",
    "outer.coding.feedback=0.9",
)
"""Added to OVERRIDES: as many rounds, each of one fragment in 4 bits that overlaps the following
inner steps.
"""


def run_with_fault(
    folder: Path,
    fault: str,
    victim: int,
    transport: str,
    address: str,
    *overrides: str,
    num_islands: int = 3,
    coordinator: int | None = None,
    own: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Run islands of which one kills or freezes itself and comes back; check the outcome and what
    is left.

    `own`: settings of that island. If it has several ranks, each is on a node of its own, and the
    first one is hit. `coordinator`: the island that is to coordinate the rounds. All others are
    slowed down, which the islands know of each other after some rounds, so the fault should not
    come in one of the first.
    """
    round_number = parse_fault(fault).round
    assert round_number is not None, "the fault comes in a round"
    islands_own: list[dict[str, Any]] = [
        {**own, "faults": [fault]} if i == victim else {"faults": []} for i in range(num_islands)
    ]
    for i, settings_of_one in enumerate(islands_own):
        settings_of_one["faults"] += [] if coordinator in (None, i) else [f"slow:{i}x{SLOWNESS}"]
    name = f"name={folder.name}"
    settings = [name, *OVERRIDES, f"outer.transport={transport}", *overrides]
    with nothing_left(), swarm(folder, *settings, islands=islands_own, address=address) as made:
        islands = made.start_all(train_on_nodes)
        if fault.startswith("kill"):
            code, *others = islands[victim].wait(GUARD_SECONDS)
            assert code == -signal.SIGKILL, (
                f"the fault did not happen:\n{islands[victim].log[-3000:]}"
            )
            assert 0 not in others, "a node went on without the first one"
            made.start(victim, train_on_nodes)
        else:
            until(lambda: islands[victim].is_stopped, "the fault", islands[victim])
            other = islands[(victim + 1) % num_islands]
            others_go_on(other, last_round(other))
            islands[victim].signal(signal.SIGCONT)
        for island in made.started:
            if not (fault.startswith("kill") and island is islands[victim]):
                island.finish(GUARD_SECONDS)
        check_outcome(made, victim, num_islands, round_number)
        if coordinator is not None:
            before = islands[(victim + 1) % num_islands].committed()[round_number - 1]
            assert before["planner"] == f"island-{coordinator}", "another island has coordinated"


def train_on_nodes(config: Config, index: int) -> None:
    """Train as `diloco train` does, with each rank on a node of its own."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    train(config, index)


def others_go_on(island: Island, last: int) -> None:
    """Wait until the island has committed two more rounds after `last`, or all rounds."""
    until(
        lambda: last_round(island) >= min(last + 2, ROUNDS - 1),
        "two more rounds of the others",
        island,
    )


def check_outcome(made: Swarm, victim: int, num_islands: int, round_number: int) -> None:
    """Check that all share one history, survivors have every round, the victim came back and the
    loss never jumped.

    Of many islands on few cores one is late now and then, and a round goes on without it: then each
    has a survivor.
    """
    islands = {
        f"island-{i}": Island(made.started[i].folder, made.started[i].ranks)
        for i in range(num_islands)
    }
    rounds = {name: island.committed() for name, island in islands.items()}
    assert_one_history(*islands.values())
    survivors = [name for i, name in enumerate(islands) if i != victim]
    assert set().union(*(rounds[name] for name in survivors)) == set(range(ROUNDS)), (
        "a round is missing"
    )
    for name in survivors if num_islands == 3 else ():
        assert set(rounds[name]) == set(range(ROUNDS)), f"{name} misses rounds"
    assert any(number > round_number for number in rounds[f"island-{victim}"]), (
        "the victim did not come back"
    )
    for name in survivors:
        losses = [record["loss"] for record in islands[name].records("eval")]
        jumps = [later - earlier for earlier, later in pairwise(losses)]
        assert max(jumps) < LOSS_STEP, f"{name}: held-out losses {losses}"
