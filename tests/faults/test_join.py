"""An island joins a running run: it takes the state, stalls no other island, and survives deaths on
both sides.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.forked import train_at_pace
from tests.faults.waits import (
    GUARD_SECONDS,
    all_records,
    assert_one_history,
    more_rounds,
    reached,
    until,
)
from tests.swarm import Island, Swarm, Work, swarm

STEPS = 4
JOINER = 2
WARMUP = ("optimizer.warmup_steps=4000", "optimizer.schedule=cosine")
"""Gives every step a different learning rate."""
both = pytest.mark.parametrize("transport", ["gloo", "hivemind"])


STEP_SECONDS = 0.05
"""Duration of an inner step, which does not depend on the machine's load unless that is very
high.
"""
PACE = train_at_pace(STEP_SECONDS)


@contextmanager
def running(
    folder: Path, transport: str, address: str, *faults: str, pace: Work
) -> Iterator[Swarm]:
    """Two islands that have committed some rounds. They train at this pace."""
    islands: list[dict[str, Any]] = [
        {"faults": [f for f in faults if f":{i}@" in f]} for i in range(3)
    ]
    islands[JOINER]["joins"] = True
    settings = [
        f"outer.inner_steps={STEPS}",
        "outer.rounds=5000",
        f"outer.transport={transport}",
        *WARMUP,
    ]
    settings += ["outer.start_islands=2", f"name={folder.name}"]
    with swarm(folder, *settings, islands=islands, address=address) as made:
        made.start(0, pace)
        made.start(1, pace)
        for island in made.started:
            reached(island, 3)
        yield made


def enters(joiner: Island) -> tuple[int, int, int]:
    """(the round whose state it took first, the one it took last, the first that it committed),
    after some commits.

    They are one, unless the machine is so busy that the others commit once more before it has made
    a step.
    """
    until(lambda: len(joiner.committed()) >= 3, "three commits of the joiner", joiner)
    taken = [int(text.split()[1].strip(",")) for text in joiner.events("joined")]
    return taken[0], taken[-1], min(joiner.committed())


@pytest.mark.slow
@both
def test_a_joiner_trains_on_the_runs_state_only_and_from_where_the_run_stands(
    tmp_path, place, transport
):
    with running(tmp_path, transport, place(transport), pace=PACE) as made:
        joiner = made.start(JOINER, PACE)
        taken, last, first = enters(joiner)
        assert taken >= 3 and first <= last + 1, (
            "it takes part in the first round boundary after its state"
        )
        records = all_records(joiner, ("event", "step"))
        assert records[0].get("name") == "joined", "no step before the state"
        steps = {record["step"]: record for record in joiner.records("step")}
        assert min(steps) == taken * STEPS + 1, (
            "data and learning rate stand where the round begins"
        )
        until(
            lambda: max(s["step"] for s in made.started[0].records("step")) >= max(steps),
            "the same steps",
            joiner,
        )
        theirs = {record["step"]: record["lr"] for record in made.started[0].records("step")}
        assert len(set(theirs.values())) == len(theirs), "the schedule tells steps apart"
        assert all(record["lr"] == theirs[step] for step, record in steps.items())
        assert_one_history(*made.started)


@pytest.mark.slow
@both
def test_others_go_on_while_a_joiner_takes_the_state(tmp_path, place, transport):
    with running(
        tmp_path, transport, place(transport), f"freeze:{JOINER}@round=0,phase=fetch", pace=PACE
    ) as made:
        joiner = made.start(JOINER, PACE)
        until(lambda: joiner.is_stopped, "the joiner stops in the middle of its download", joiner)
        more_rounds(made.started[0], 5, ["island-0", "island-1"])
        assert not joiner.records("step")
        joiner.signal(signal.SIGCONT)
        enters(joiner)
        assert_one_history(*made.started)


@pytest.mark.parametrize("transport", ["gloo", pytest.param("hivemind", marks=pytest.mark.slow)])
def test_a_joiner_killed_in_its_download_resumes_and_gets_in(tmp_path, place, transport):
    with running(
        tmp_path, transport, place(transport), f"kill:{JOINER}@round=0,phase=fetch", pace=PACE
    ) as made:
        assert made.start(JOINER, PACE).wait(GUARD_SECONDS) == [-signal.SIGKILL]
        parts = list((tmp_path / tmp_path.name / "island-2" / "incoming").rglob("part-??????"))
        again = made.start(JOINER, PACE)
        enters(again)
        whole = [
            line for line in again.log.splitlines() if "parts of the state are on disk" in line
        ]
        # The first line is that of the killed life; a joiner that falls behind once more adds
        # others, without a part.
        assert parts and f" {len(parts)} of " in whole[1], (
            f"{len(parts)} parts on disk, and the log says {whole}"
        )
        assert_one_history(*made.started)


@pytest.mark.slow
@both
def test_a_donor_killed_while_it_gives_does_not_matter(tmp_path, place, transport):
    # Rounds are long, so that the records of both donors are known before the next one: it takes
    # from both then.
    pace = train_at_pace(STEP_SECONDS if transport == "gloo" else 8 * STEP_SECONDS)
    fault = "kill:1@round=3,phase=donate"
    with running(tmp_path, transport, place(transport), fault, pace=pace) as made:
        joiner = made.start(JOINER, pace)
        assert made.started[1].wait(GUARD_SECONDS) == [-signal.SIGKILL]
        enters(joiner)
        more_rounds(made.started[0], 2, ["island-0", "island-2"])
        assert_one_history(made.started[0], joiner)


@pytest.mark.slow
def test_an_island_that_must_join_is_told_when_only_fresh_ones_are_there(tmp_path):
    with swarm(tmp_path, "outer.start_islands=3", islands=[{}, {"joins": True}]) as made:
        fresh = made.start(0)
        until(lambda: fresh.records("step"), "the fresh island trains", fresh)
        lonely = made.start(1)
        assert lonely.wait(GUARD_SECONDS) == [1]
        assert "finds no island that has committed a round" in lonely.log
        assert not lonely.records("step")
