"""A rehearsal keeps a config's outer settings, makes every fault, and says what did not recover."""

from pathlib import Path

import pytest
from rich.console import Console

from diloco.config.check import check_fragments
from diloco.config.schema import load_config, parse_config
from diloco.errors import ConfigError
from diloco.faults.spec import check_processes, check_targets, parse_fault
from diloco.records.faults import FaultRecord
from diloco.records.metrics import RoundRecord
from diloco.records.run_folder import IslandRecords, RunRecords
from diloco.rehearsal.run import in_the_small, planned_faults, uses_relays
from diloco.rehearsal.table import find_outcomes, print_rehearsal

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
TWO = "outer: {start_islands: 2, transport: gloo, codec: int4, quorum: 2}"


def commit(
    number: int, at: float, digest: str = "a", by: tuple[str, ...] = ("island-0", "island-1")
) -> RoundRecord:
    return RoundRecord(
        round=number,
        attempt=0,
        participants=by,
        committed=True,
        digest=f"{digest}{number}",
        bytes_sent=1,
        bytes_received=1,
        reduce_seconds=0.1,
        wait_seconds=0.0,
        pseudo_gradient_norm=1.0,
        time=at,
    )


def fault(kind: str, at: float, *islands: str, is_end: bool = False) -> FaultRecord:
    text = f"{kind} {', '.join(islands)}"
    return FaultRecord(
        spec=f"{kind}:1", kind=kind, islands=islands, text=text, is_end=is_end, time=at
    )


def run_of(faults: list[FaultRecord], *rounds: list[RoundRecord]) -> RunRecords:
    islands = [IslandRecords(f"island-{index}", rounds=each) for index, each in enumerate(rounds)]
    return RunRecords(Path("runs/x"), None, islands, None, faults)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_shipped_config_can_be_rehearsed(path: Path) -> None:
    config = load_config(path)
    if len(config.islands) < 2 and config.outer.start_islands < 2:
        pytest.skip("a run of one island")
    small = in_the_small(config)
    assert small.outer.model_copy(update={"rounds": 1}) == config.outer.model_copy(
        update={"rounds": 1, "start_islands": small.outer.start_islands}
    )
    faults = [parse_fault(text) for text in planned_faults(small, can_cut=True)]
    ranks = [small.for_island(index).ranks for index in range(len(small.islands))]
    check_targets(faults, len(small.islands), has_bootstrap=small.outer.network.leaves_process)
    check_processes(faults, ranks, has_daemon=small.outer.network.has_daemon)


def test_a_run_of_one_island_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs two islands"):
        in_the_small(parse_config("outer: {start_islands: 1}"))


def test_a_run_that_treats_experts_otherwise_is_rehearsed_with_a_small_mixture() -> None:
    text = (
        "{model: {preset: 1m-experts}, outer: {start_islands: 2, rounds: 9, experts: {every: "
        "3}, transport: gloo}}"
    )
    small = in_the_small(parse_config(text))
    check_fragments(small.run)
    assert small.outer.experts.every == 3 and small.model.experts is not None
    assert in_the_small(parse_config(TWO)).model.experts is None


def test_a_cut_is_left_out_where_links_cannot_be_cut() -> None:
    small = in_the_small(parse_config(TWO))
    assert not [text for text in planned_faults(small, can_cut=False) if text.startswith("cut")]


def test_all_islands_are_killed_at_once_and_a_relay_where_the_config_has_one() -> None:
    given = parse_config(
        "{outer: {start_islands: 2, transport: tls}, island: {relays: ['203.0.113.7:31400']}}"
    )
    faults = list(planned_faults(in_the_small(given), can_cut=True, has_relays=uses_relays(given)))
    assert {"kill:0+1@second=0,back=1", "kill:relay0@second=0,back=1"} <= set(faults)
    assert not uses_relays(parse_config(TWO))


def test_times_are_those_from_the_fault_to_the_commits_of_the_others_and_of_the_island_itself() -> (
    None
):
    faults = [fault("kill", 10.0, "island-1"), fault("kill", 15.0, "island-1", is_end=True)]
    run = run_of(faults, [commit(0, 9.0), commit(1, 12.0)], [commit(0, 9.0), commit(2, 18.0)])
    (outcome,) = find_outcomes(run)
    assert (outcome.others, outcome.itself, outcome.is_good) == (2.0, 3.0, True)


def test_an_island_that_does_not_come_back_is_said() -> None:
    run = run_of(
        [fault("kill", 10.0, "island-1")], [commit(0, 9.0), commit(1, 12.0)], [commit(0, 9.0)]
    )
    console = Console(record=True, width=200)
    assert not print_rehearsal(run, console)
    assert "NOT RECOVERED: kill island-1" in console.export_text()


def test_others_that_do_not_commit_again_are_said() -> None:
    run = run_of(
        [fault("corrupt", 10.0, "island-1")], [commit(0, 9.0)], [commit(0, 9.0), commit(1, 12.0)]
    )
    assert not print_rehearsal(run, Console(record=True))


def test_when_all_islands_were_hit_they_alone_have_to_come_back() -> None:
    faults = [
        fault("kill", 10.0, "island-0", "island-1"),
        fault("kill", 15.0, "island-0", "island-1", is_end=True),
    ]
    first, second, joiner = (
        [commit(0, 9.0), commit(1, 18.0)],
        [commit(0, 9.0), commit(1, 18.0)],
        [commit(2, 30.0)],
    )
    (outcome,) = find_outcomes(run_of(faults, first, second, joiner))
    assert (outcome.others, outcome.itself, outcome.is_good) == (None, 3.0, True)
    (outcome,) = find_outcomes(run_of(faults, first[:1], second[:1]))
    assert not outcome.is_good


def test_a_bootstrap_process_has_no_rounds_of_its_own() -> None:
    run = run_of([fault("kill", 10.0, "bootstrap")], [commit(1, 12.0)], [commit(1, 12.0)])
    assert print_rehearsal(run, Console(record=True))


def test_only_a_cut_lets_islands_commit_apart() -> None:
    own = [
        commit(1, 12.0, digest, by=(name,))
        for digest, name in (("a", "island-0"), ("b", "island-1"))
    ]
    apart = [own[0], commit(2, 20.0)], [own[1], commit(2, 20.0)]
    assert print_rehearsal(run_of([fault("cut", 10.0, "island-1")], *apart), Console(record=True))
    assert not print_rehearsal(
        run_of([fault("kill", 10.0, "island-1")], *apart), Console(record=True)
    )


def test_participants_of_one_round_that_disagree_are_a_failure_also_during_a_cut() -> None:
    rounds = [commit(1, 12.0), commit(2, 20.0)], [commit(1, 12.0, "b"), commit(2, 20.0)]
    console = Console(record=True, width=200)
    assert not print_rehearsal(run_of([fault("cut", 10.0, "island-1")], *rounds), console)
    assert "PARTICIPANTS DISAGREE in rounds 1" in console.export_text()


def test_states_that_differ_at_the_end_are_a_failure() -> None:
    run = run_of([fault("cut", 10.0, "island-1")], [commit(1, 12.0)], [commit(1, 12.0, "b")])
    console = Console(record=True, width=200)
    assert not print_rehearsal(run, console)
    assert "NOT EQUAL" in console.export_text()
