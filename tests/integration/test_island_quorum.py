"""Real islands whose rounds wait only for a quorum: each trains at its own pace, and all hold one
state.
"""

import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from diloco.checkpoints.global_params import find_newest_checkpoint
from diloco.records.metrics import RoundRecord
from diloco.records.run_folder import read_run
from diloco.report.data_account import data_account, distinct_commits, surviving_history
from outer.rounds.checkpoint import parse_facts
from tests.faults.waits import all_records, assert_one_history
from tests.swarm import Island, swarm

ONE, FSDP2, SLOW = {"ranks": 1}, {"ranks": 2}, {"ranks": 1, "faults": ["slow:2x4"]}
QUORUM = (
    "outer.wait_for=quorum",
    "outer.optimizer.delayed=true",
    "outer.inner_steps=4",
    "outer.start_islands=3",
)


def last_digest(island: Island) -> str:
    """The first 12 digits of the digest of the last state that the island has committed, or taken
    from others.
    """
    found = [
        record["text"].rpartition(" ")[2] if record["kind"] == "event" else record["digest"][:12]
        for record in all_records(island, ("round", "event"))
        if record.get("committed") or record.get("name") == "joined"
    ]
    return found[-1]


def check_equal(islands: Sequence[Island]) -> None:
    """Check that each round has one digest and that all islands end with the same state."""
    assert_one_history(*islands)
    assert len({last_digest(island) for island in islands}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fragments", [1, 2])
def test_islands_of_unequal_speed_and_mesh_end_with_the_tokens_of_all_and_one_state(
    tmp_path, fragments
):
    overrides = (
        *QUORUM,
        "outer.rounds=4",
        f"outer.fragments={fragments}",
        "outer.local_steps=dynamic",
    )
    with swarm(tmp_path, *overrides, islands=[ONE, FSDP2, SLOW]) as islands:
        running = islands.start_all()
        for island in running:
            island.finish()
        check_equal(running)
        ends = [island.records("eval")[-1] for island in running]
        assert {end["round"] for end in ends} == {4}
        assert [end["loss"] for end in ends] == pytest.approx([ends[0]["loss"]] * 3, rel=1e-5)
        assert len({end["tokens"] for end in ends}) == 1
        rounds = running[0].committed().values()
        listened = Counter(name for record in rounds for name in record["listeners"])
        assert len(rounds) > 4 * fragments and listened


@pytest.mark.slow
def test_the_others_make_the_tokens_of_an_island_that_was_killed(tmp_path):
    with swarm(tmp_path, *QUORUM, "outer.rounds=6", islands=[ONE, FSDP2, ONE]) as islands:
        first, second, victim = islands.start_all()
        victim.wait_for_round(1)
        victim.signal(signal.SIGKILL)
        first.finish()
        second.finish()
        check_equal([first, second])
        assert first.records("eval")[-1]["round"] == 6


def wait_for_checkpoints(folder: Path, num_islands: int) -> None:
    """Wait until that many islands have saved a checkpoint."""
    deadline = time.monotonic() + 240
    while len({path.parent for path in folder.glob("**/checkpoints/step-????????")}) < num_islands:
        assert time.monotonic() < deadline, "an island has not saved"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("fragments", [1, 2])
def test_islands_go_on_from_their_checkpoints(tmp_path, fragments):
    overrides = (
        *QUORUM,
        "outer.rounds=20",
        f"outer.fragments={fragments}",
        "island.checkpoint.every_rounds=1",
    )
    with swarm(tmp_path, *overrides, islands=[ONE, FSDP2, SLOW]) as islands:
        running = islands.start_all()
        wait_for_checkpoints(tmp_path, 3)
        for island in running:
            island.signal(signal.SIGKILL)
            island.wait()
        running = islands.start_all()
        for island in running:
            island.finish()
        ends = [island.records("eval")[-1] for island in running]
        assert {end["round"] for end in ends} == {20}
        assert len({end["tokens"] for end in ends}) == 1
        assert all(
            "resumed" in [event["name"] for event in island.records("event")] for island in running
        )
        history = surviving_rounds(tmp_path / "test")
        assert {last_digest(island) for island in running} == {history[0].digest[:12]}
        assert ends[0]["tokens"] <= 512 * history[0].trained_units


def surviving_rounds(run_dir: Path) -> list[RoundRecord]:
    """The committed rounds behind the state with which the run ended, the last one first; one
    record of each.

    Records of rounds that are not among them belong to a history that was thrown away: an island
    has committed rounds that nobody had saved when all were killed, or that fewer tokens led to
    than to another island's state.
    """
    committed = [
        record for island in read_run(run_dir).islands for record in distinct_commits(island.rounds)
    ]
    rounds = surviving_history(
        committed, max(committed, key=lambda record: (record.trained_units, record.round))
    )
    return list({record.digest: record for record in rounds}.values())


def surviving_checkpoint(run_dir: Path) -> tuple[str, str]:
    """Island and digest of the saved state from which a resumed run goes on, by the rule for two
    histories.
    """
    found = [find_newest_checkpoint(run_dir, f"island-{index}") for index in range(3)]
    facts = {one.path.parts[-3]: parse_facts(one.facts["outer"]) for one in found}
    best = max((one.position.tokens, one.position.round) for one in facts.values())
    best_ones = {
        name: one
        for name, one in facts.items()
        if (one.position.tokens, one.position.round) == best
    }
    counts = Counter(one.digest for one in best_ones.values())
    digest = min(counts, key=lambda digest: (-counts[digest], digest))
    return next(name for name, one in best_ones.items() if one.digest == digest), digest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_and_resumed_the_state_is_the_one_saved_and_no_unit_is_trained_twice(tmp_path):
    overrides = (
        *QUORUM,
        "outer.quorum=1",
        "outer.local_steps=dynamic",
        "outer.rounds=8",
        "outer.codec=bf16",
    )
    with swarm(
        tmp_path, *overrides, "island.checkpoint.every_rounds=1", islands=[ONE, ONE, SLOW]
    ) as islands:
        running = islands.start_all()
        wait_for_checkpoints(tmp_path, 3)
        for island in running:
            island.signal(signal.SIGKILL)
            island.wait()
        name, digest = surviving_checkpoint(tmp_path / "test")
        running = islands.start_all()
        for island in running:
            island.finish(400)
        first = next(island for island in running if island.folder.name == name)
        assert first.events("joined")[1].endswith(f"digest {digest[:12]}"), (
            "it goes on from the state it has saved"
        )
        history = surviving_rounds(tmp_path / "test")
        assert {last_digest(island) for island in running} == {history[0].digest[:12]}
        assert digest in [record.digest for record in history], "and so does the run"
        assert [record.round for record in history] == list(reversed(range(len(history))))
        account = data_account(read_run(tmp_path / "test").islands)
        assert account["units_repeated"] == 0 and account["units_trained"] >= 8 * 4 * 3
