"""Experts weighted by routed tokens, between islands of unequal ep: through a kill, a joiner and a
NaN, and resumed.
"""

import json
import signal
from pathlib import Path

import pytest

from tests.faults.waits import assert_one_history, until
from tests.swarm import swarm

EXPERTS = {"number": 4, "per_token": 2, "dim": 16, "dense_layers": 1}
ROUTED = (
    f"model.experts={json.dumps(EXPERTS)}",
    "optimizer.balance.bias_speed=0.02",
    "outer.merge.experts=routed",
    "outer.optimizer.momentum=0.9",
    "outer.codec=int8",
    "outer.experts.codec=int4",
)
EP4 = {"ranks": 4, "mesh": {"ep": 4}}
EP2_TP2 = {"ranks": 4, "mesh": {"tp": 2, "ep": 2}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("outer.experts.every=2",),
        ("outer.audit=1.0",),
        ("outer.wait_for=quorum", "outer.quorum=2"),
    ],
    ids=str,
)
def test_islands_of_unequal_ep_commit_equal_states_after_a_kill_a_joiner_and_a_nan(
    tmp_path: Path, changes: tuple[str, ...]
) -> None:
    islands = [
        EP4,
        {**EP2_TP2, "faults": ["nan:1@round=2"]},
        {},
        {"ranks": 2, "mesh": {"ep": 2}, "joins": True},
    ]
    with swarm(
        tmp_path, *ROUTED, *changes, "outer.rounds=20", "outer.start_islands=3", islands=islands
    ) as made:
        running = [made.start(index) for index in range(3)]
        running[2].wait_for_round(1)
        running[2].signal(signal.SIGKILL)
        running[2].wait()
        running[2] = made.start(2)
        running.append(made.start(3))
        for island in running:
            island.finish()
        assert_one_history(*running)


@pytest.mark.slow
def test_a_run_goes_on_with_another_ep_in_the_middle_of_a_cycle_of_experts(tmp_path: Path) -> None:
    saving = (
        *ROUTED,
        "outer.experts.every=2",
        "outer.rounds=10",
        "island.checkpoint.every_rounds=1",
    )
    with swarm(tmp_path, *saving, islands=[{"ranks": 2, "mesh": {"ep": 2}}, {}]) as made:
        made.start_all()
        until(
            lambda: (
                len({path.parent for path in tmp_path.glob("**/checkpoints/step-????????")}) == 2
            ),
            "both have saved",
        )
    with swarm(tmp_path, *saving, islands=[{}, {"ranks": 2, "mesh": {"ep": 2}}]) as made:
        for island in made.start_all():
            island.finish()
        assert_one_history(*made.started)
        assert all(island.events("resumed") for island in made.started)
