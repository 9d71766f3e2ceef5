"""The data account from the records of committed rounds."""

from diloco.records.metrics import RoundRecord
from diloco.records.run_folder import IslandRecords
from diloco.report.data_account import data_account


def commit(number: int, base: str, digest: str, runs: list[list[int]], trained: int) -> RoundRecord:
    return RoundRecord(
        round=number,
        attempt=0,
        participants=("a", "b"),
        committed=True,
        digest=digest,
        bytes_sent=0,
        bytes_received=0,
        reduce_seconds=0.0,
        wait_seconds=0.0,
        pseudo_gradient_norm=1.0,
        base=base,
        units=runs,
        steps=sum(count for _, count, _ in runs),
        trained_units=trained,
        open_units=100 - trained,
    )


def run_of(*islands: list[RoundRecord]) -> list[IslandRecords]:
    return [IslandRecords(f"island-{i}", rounds=rounds) for i, rounds in enumerate(islands)]


def test_the_last_commits_account_is_the_runs() -> None:
    first = [commit(0, "0", "1", [[0, 3, 2]], 6), commit(1, "1", "2", [[6, 3, 2]], 12)]
    second = [commit(0, "0", "1", [[1, 3, 2]], 6), commit(1, "1", "2", [[7, 3, 2]], 12)]
    account = data_account(run_of(first, second))
    assert account == {
        "units_trained": 12,
        "units_repeated": 0,
        "units_open": 88,
        "steps_accounted": 12,
    }


def test_units_read_twice_are_counted() -> None:
    first, second = (
        [commit(0, "0", "1", [[0, 3, 2]], 6)],
        [commit(0, "0", "1", [[2, 1, 1], [4, 2, 1]], 6)],
    )
    assert data_account(run_of(first, second))["units_repeated"] == 2


def test_the_side_of_a_cut_that_did_not_survive_does_not_count() -> None:
    first = [
        commit(0, "0", "1", [[0, 2, 2]], 4),
        commit(1, "1", "2", [[4, 4, 1]], 8),
        commit(2, "2", "3", [], 9),
    ]
    second = [
        commit(0, "0", "1", [[1, 2, 2]], 4),
        commit(1, "1", "x", [[5, 2, 1]], 6),
        commit(2, "2", "3", [], 9),
    ]
    account = data_account(run_of(first, second))
    assert (account["units_repeated"], account["steps_accounted"]) == (0, 8)


def test_a_run_without_such_records_has_no_account() -> None:
    old = commit(0, "", "1", [], 0)
    assert data_account(run_of([old])) == dict.fromkeys(
        ("units_trained", "units_repeated", "units_open", "steps_accounted")
    )


def test_a_round_made_again_after_a_stop_counts_once() -> None:
    rounds = [commit(0, "0", "1", [[0, 3, 1]], 3), commit(1, "1", "2", [[3, 3, 1]], 6)]
    account = data_account(run_of([*rounds, rounds[1]]))
    assert account == {
        "units_trained": 6,
        "units_repeated": 0,
        "units_open": 94,
        "steps_accounted": 6,
    }
