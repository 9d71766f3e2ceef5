"""The first lines about a run, from records like those of an island's training."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from diloco.errors import ConfigError
from diloco.overview.account import RunAccount, account_for
from diloco.overview.headline import describe, find_headline
from diloco.overview.overview import describe_islands, find_overview
from diloco.overview.since import describe_since, find_since, lines_since, parse_since
from diloco.records.kept_config import RunPlan
from diloco.records.metrics import (
    EvalRecord,
    EventRecord,
    PauseRecord,
    Record,
    RoundRecord,
    StepRecord,
)
from diloco.records.run_folder import RunFacts
from tests.diloco.sample_records import a_round, a_step

BEGIN = 1_700_000_000.0
FACTS = RunFacts(name="test", num_params=1000, num_islands=2, total_steps=10)
PLAN = RunPlan("test", None, FACTS)


def event(name: str, at: float, text: str = "") -> EventRecord:
    return EventRecord(name=name, text=text, time=BEGIN + at)


def step(number: int, at: float, seconds: float = 2.0) -> StepRecord:
    return replace(a_step(number), seconds=seconds, time=BEGIN + at)


def round_of(number: int, at: float, committed: bool = True, **changes: object) -> RoundRecord:
    return a_round(
        number,
        committed,
        time=BEGIN + at,
        **{"wait_seconds": 1.0, "reduce_seconds": 1.0, **changes},
    )


def evaluation(at: float, tokens: int, loss: float, seconds: float = 0.0) -> EvalRecord:
    return EvalRecord(
        round=1, tokens=tokens, loss=loss, bits_per_byte=1.0, seconds=seconds, time=BEGIN + at
    )


def account(*islands: Sequence[Record]) -> RunAccount:
    return account_for((f"island-{number}", records) for number, records in enumerate(islands))


CALM = [
    event("joined", 0, "round 0, 0 tokens"),
    step(1, 2),
    round_of(0, 4),
    evaluation(8, 512, 2.0, seconds=4.0),
]


def test_each_second_of_an_island_has_one_activity() -> None:
    pause = PauseRecord(name="saving", seconds=1.0, time=BEGIN + 9)
    seconds = (
        account([*CALM, pause, event("waiting", 12, "for island-1")]).islands["island-0"].seconds()
    )
    assert {name: value for name, value in seconds.items() if value} == {
        "computing": 2.0,
        "waiting": 1.0,
        "network": 1.0,
        "evaluating": 4.0,
        "saving": 1.0,
        "other": 3.0,
    }


def test_a_round_behind_inner_steps_costs_no_time() -> None:
    hidden = [
        event("joined", 0, "round 0,"),
        step(1, 2),
        step(2, 4),
        step(3, 6),
        round_of(0, 6, reduce_seconds=3.0),
    ]
    seconds = account(hidden).islands["island-0"].seconds()
    assert (seconds["computing"], seconds["network"], seconds["waiting"], seconds["other"]) == (
        6.0,
        0.0,
        0.0,
        0.0,
    )


def test_the_first_line_tells_round_loss_islands_time_and_bytes() -> None:
    records = [
        *CALM,
        step(2, 10),
        round_of(1, 12),
        evaluation(3700, 1024, 1.5),
        evaluation(7300, 2048, 1.25),
    ]
    line = find_headline(account(records, CALM), PLAN, BEGIN + 7301)
    assert (line.state, line.round, line.islands_in, line.islands_expected) == ("training", 2, 2, 2)
    assert (line.heldout_loss, line.loss_change, line.change_seconds) == (1.25, -0.25, 3600.0)
    # Data-parallel training sends 2 bytes of each of 1000 gradients in each of three steps; here
    # are three attempts.
    assert line.traffic_ratio == pytest.approx(3 * 2000 / 3000)
    assert "held-out 1.2500 (-0.2500 in 1 h 00 min)" in describe(line) and "2.0x less" in describe(
        line
    )


def test_the_first_line_tells_the_newest_stage() -> None:
    assert "stage" not in describe(find_headline(account(CALM, CALM), PLAN, BEGIN + 20))
    stages = [
        event("stage", 8, "2 of 3 from unit 5: lr 1"),
        event("stage", 9, "2 of 3 from unit 5: lr 1"),
    ]
    line = find_headline(account([*CALM, *stages], CALM), PLAN, BEGIN + 20)
    assert " · stage 2 of 3 · " in describe(line)


@pytest.mark.parametrize(
    ("end", "state", "is_trouble"),
    [
        (event("left", 20, "the run's 2 rounds are done"), "done", False),
        (event("left", 20, "stopped by SIGTERM"), "stopped", False),
        (event("died", 20, "rank 1 was ended by SIGKILL"), "ended by a failure", True),
        (event("waiting", 20, "for island-1"), "waiting", True),
        (event("stage", 20, "2 of 2"), "training", False),
    ],
)
def test_the_state_of_the_run_is_said_in_words(
    end: EventRecord, state: str, is_trouble: bool
) -> None:
    line = find_headline(account([*CALM, end]), PLAN, BEGIN + 21)
    assert (line.state, line.is_trouble) == (state, is_trouble)


RETURN = [
    event("died", 5, "rank 1 was ended by SIGKILL"),
    event("started again", 9, "rank 1 was ended by SIGKILL"),
    event("resumed", 9, "inner step 1, round 1"),
    event("joined", 10, "round 3, 99 tokens"),
]


def test_an_absence_is_from_the_end_to_the_entry_and_its_rounds_are_counted() -> None:
    alone = [round_of(number, 6.0 + number, participants=("island-0",)) for number in (1, 2)]
    run = account([*CALM, *alone, step(2, 20)], [*CALM[:3], *RETURN, step(2, 20)])
    (absence,) = run.islands["island-1"].absences
    assert (absence.begin, absence.end, absence.is_failure) == (BEGIN + 5, BEGIN + 10, True)
    assert run.islands["island-1"].seconds()["away"] == 5.0
    assert "island-1 died once, missed 2 rounds" in describe_since(run, 0.0, BEGIN + 20)
    assert "missed" not in describe_since(run, BEGIN + 11, BEGIN + 20)


def test_a_kill_that_nobody_could_record_is_found_by_the_next_start() -> None:
    run = account(
        CALM,
        [*CALM[:3], event("resumed", 9, "inner step 1, round 1"), event("joined", 10, "round 3,")],
    )
    (died,) = [each for each in run.incidents if each.kind == "died"]
    assert (died.island, died.time) == ("island-1", BEGIN + 4) and "without a record" in died.cause


def test_a_kill_that_the_next_start_explains_is_told_once() -> None:
    died = event("died", 9.5, "rank 1 (node 1) ended without a word")
    run = account(
        [
            *CALM[:3],
            event("started again", 9, "its end is not known"),
            died,
            event("joined", 10, "round 3,"),
        ]
    )
    (told,) = [each for each in run.incidents if each.kind == "died"]
    assert (told.time, told.cause) == (BEGIN + 4, "rank 1 (node 1) ended without a word")


def test_an_island_that_caught_up_was_not_away() -> None:
    run = account(
        [*CALM, event("caught up", 9, "round 3"), event("joined", 9.5, "round 3,"), step(2, 12)]
    )
    assert run.islands["island-0"].absences == []


def test_the_worst_comes_first_and_what_is_alike_is_one_line() -> None:
    aborts = [
        round_of(number, 5.0 + number, committed=False, cause="timed out after 4 s")
        for number in (1, 2, 3)
    ]
    run = account([*CALM, *aborts], [*CALM[:2], round_of(0, 4, digest="other"), *aborts])
    kinds = [(each.kind, each.count) for each in find_since(run, 0.0)]
    assert kinds == [("disagreement", 1), ("aborted", 3)]
    first, second = lines_since(run, 0.0, BEGIN + 10)
    assert (
        "disagreement: round 0: digests ab12 and other" in first
        and "Cure: the islands repair it" in first
    )
    assert "aborted 3x, last: round 3: timed out after 4 s" in second
    assert "1 DISAGREEMENTS" in find_overview(run, PLAN, now=BEGIN + 10).since


def test_all_losses_are_one_line_with_the_islands_that_were_lost() -> None:
    key = "tls:" + 64 * "a" + "@10.0.0.1:1"
    lost = [
        event("lost", 9 + number, f"island-{number}: {key} does not answer") for number in (2, 1)
    ]
    (told,) = find_since(account([*CALM, *lost]), 0.0)
    assert (told.who, told.count) == ("island-1, island-2", 2)
    assert told.cause == "island-0 lost island-2: tls:aaaaaaaa..@10.0.0.1:1 does not answer"


def test_the_first_line_names_the_island_for_which_the_others_wait() -> None:
    late = [round_of(number, 4.0 + number, wait_seconds=0.0) for number in range(3)]
    kept_waiting = [round_of(number, 4.0 + number, wait_seconds=2.0) for number in range(3)]
    line = find_headline(account([*CALM[:2], *late], [*CALM[:2], *kept_waiting]), PLAN, BEGIN + 8)
    assert line.slowest == "island-0" and "(most for island-0)" in describe(line)


def test_the_summary_names_islands_that_were_late_are_gone_or_were_left_out() -> None:
    late = [event("joined", 5, "round 1, 512 tokens"), step(1, 6), step(2, 9)]
    alone = round_of(1, 8, participants=("island-0", "island-1"))
    gone = [*CALM[:3], event("hung", 9, "rank 0 does not answer")]
    told = describe_islands(account([*CALM, alone], gone, late))
    assert told["islands_late"] == {"island-2": 1}
    assert told["islands_gone"] == {"island-1": "hung: rank 0 does not answer"}
    assert told["rounds_left_out"] == {"island-2": 1}


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("8h", BEGIN - 8 * 3600),
        ("30min", BEGIN - 1800),
        ("22:00", BEGIN - 13 * 60 - 20),
        ("22:30", BEGIN - 86400 + 16 * 60 + 40),
        ("2023-11-14T22:00", BEGIN - 13 * 60 - 20),
        ("2023-11-14T23:00+01:00", BEGIN - 13 * 60 - 20),
    ],
)
def test_a_time_is_read_as_people_write_it(text: str, moment: float) -> None:
    assert parse_since(text, BEGIN) == moment


def test_another_time_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="--since: got 'yesterday'; allowed: a time ago"):
        parse_since("yesterday", BEGIN)
