"""Faults: parsing of specs, faults that an island inflicts on itself, and random storms."""

import os
import signal
from itertools import islice
from pathlib import Path

import pytest
import torch

from diloco.errors import ConfigError
from diloco.faults.self_inflicted import FAULTS_FOLDER, build_hooks, claim, request_fault, slow_down
from diloco.faults.spec import (
    EXAMPLES,
    Fault,
    check_nodes_of,
    check_processes,
    check_targets,
    parse_fault,
)
from diloco.faults.storm import TAKES_DOWN, storm
from diloco.records.faults import FaultRecord, read_faults, record_fault
from outer.hooks import NO_HOOKS, PHASES

VALUES = torch.arange(8.0)
PAYLOAD = torch.arange(64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:1@round=3,back=5", Fault(kind="kill", targets=(1,), round=3, back=5.0)),
        ("kill:bootstrap@round=2", Fault(kind="kill", targets=("bootstrap",), round=2)),
        ("freeze:1@round=3", Fault(kind="freeze", targets=(1,), round=3, seconds=20.0)),
        (
            "freeze:0@round=0,phase=vote",
            Fault(kind="freeze", targets=(0,), round=0, phase="vote", seconds=20.0),
        ),
        (
            "cut:0-1@step=40",
            Fault(kind="cut", targets=(0,), other_side=(1,), step=40, seconds=15.0),
        ),
        ("cut:0@round=1,seconds=2", Fault(kind="cut", targets=(0,), round=1, seconds=2.0)),
        (
            "cut:0+1-2+bootstrap@step=9",
            Fault(kind="cut", targets=(0, 1), other_side=(2, "bootstrap"), step=9, seconds=15.0),
        ),
        ("slow:2x3", Fault(kind="slow", targets=(2,), factor=3.0)),
        (
            "slow:2x1.5@second=7.25",
            Fault(kind="slow", targets=(2,), factor=1.5, second=7.25, seconds=10.0),
        ),
        ("corrupt:1@round=4", Fault(kind="corrupt", targets=(1,), round=4)),
        ("poison:1@round=5,rounds=1", Fault(kind="poison", targets=(1,), round=5, rounds=1)),
        ("join:@round=4", Fault(kind="join", round=4)),
        (
            "kill:1@round=3,process=rank1,back=2",
            Fault(kind="kill", targets=(1,), round=3, process="rank1", back=2.0),
        ),
        (
            "freeze:0@step=2,process=daemon",
            Fault(kind="freeze", targets=(0,), step=2, process="daemon", seconds=20.0),
        ),
        ("leave:1@round=6", Fault(kind="leave", targets=(1,), round=6)),
        (
            "kill:0@round=2,node=1,back=3",
            Fault(kind="kill", targets=(0,), round=2, node=1, back=3.0),
        ),
        (
            "freeze:0@round=2,process=agent,node=0",
            Fault(kind="freeze", targets=(0,), round=2, process="agent", node=0, seconds=20.0),
        ),
        ("cut:0@round=2,node=1", Fault(kind="cut", targets=(0,), round=2, node=1, seconds=15.0)),
    ],
)
def test_a_fault_is_read_as_it_is_meant_and_written_so_that_it_is_read_again(text, fault):
    assert parse_fault(text) == fault
    assert parse_fault(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("klil:1@round=3", "did you mean 'kill'"),
        ("kill", "':' must follow 'kill'"),
        ("kill:1", "add @round=N or @step=N"),
        ("kill:one@round=3", "got 'one' for an island"),
        ("freeze:0+1@round=1", "allowed: one island, or bootstrap"),
        ("kill:0+1@round=1,phase=decide", "a phase, process or node belongs to one island"),
        ("kill:1@rond=3", "did you mean 'round'"),
        ("kill:1@round=-1", "got '-1'; allowed: a whole number from 0 on"),
        ("kill:1@round=1,step=2", "one of them only"),
        ("kill:1@round=1,round=2", "once"),
        ("kill:1@step=2,phase=vote", "@round=N,phase="),
        ("kill:bootstrap@round=2,phase=vote", "@round=N,phase="),
        ("kill:1@round=2,phase=vot", "did you mean 'vote'"),
        ("kill:1@round=2,process=2", "got '2'; allowed: rank0, rank1, ..., daemon or agent"),
        ("kill:1@round=2,process=agent", "each node has one; add node=N"),
        ("kill:1@round=2,process=rank1,node=0", "rank1 is one process wherever it runs"),
        ("cut:0-1@round=2,node=1", "a node belongs to a single island"),
        ("freeze:1@round=2,phase=vote,node=0", "a node belongs to a single island"),
        ("kill:1@round=2,node=x", "got 'x'; allowed: a whole number from 0 on"),
        ("kill:1@round=2,phase=vote,process=rank1", "a phase already determines the process"),
        ("kill:bootstrap@round=2,process=daemon", "a process belongs to an island"),
        ("freeze:1@round=2,seconds=x", "a number of seconds"),
        ("slow:2", "an island, 'x' and a number above 1"),
        ("slow:2x1", "a number above 1"),
        ("join:3@round=1", "a join names no island"),
        ("cut:0+1-1@round=1", "1 is on both sides"),
        ("leave:bootstrap@round=1", "allowed: one island"),
        ("poison:1@step=3", "unknown option 'step'"),
    ],
)
def test_a_mistyped_fault_is_answered_with_what_was_got_what_is_allowed_and_an_example(text, says):
    with pytest.raises(ConfigError) as error:
        parse_fault(text)
    assert says in str(error.value) and text in str(error.value)
    assert any(f"for example {example}" in str(error.value) for example in EXAMPLES.values())


def test_an_island_that_will_not_be_there_is_refused_and_joiners_count():
    with pytest.raises(ConfigError, match="no island 2; allowed: 0 to 1"):
        check_targets([parse_fault("kill:2@round=1")], 2, has_bootstrap=True)
    check_targets(
        [parse_fault("kill:2@round=9"), parse_fault("join:@round=1")], 2, has_bootstrap=True
    )
    with pytest.raises(ConfigError, match="no bootstrap"):
        check_targets([parse_fault("kill:bootstrap@round=1")], 1, has_bootstrap=False)


@pytest.mark.parametrize(
    "num_nodes, says", [(1, "the islands have one node each"), (2, "have the nodes 0 to 1")]
)
def test_a_node_that_will_not_be_there_is_refused(num_nodes, says):
    with pytest.raises(ConfigError, match=says):
        check_nodes_of([parse_fault("kill:0@round=1,node=2")], num_nodes)
    check_nodes_of([parse_fault("kill:0@round=1,node=2")], 3)


def test_an_island_without_faults_has_no_hooks(tmp_path):
    assert build_hooks(["slow:1x3"], 0, 0, tmp_path) is NO_HOOKS
    slow_down(NO_HOOKS, 1e9)


def test_a_fault_for_the_launcher_is_refused_in_an_islands_config(tmp_path):
    with pytest.raises(ConfigError, match="diloco simulate"):
        build_hooks(["cut:0-1@round=2"], 0, 0, tmp_path)


def test_poison_turns_pseudo_gradients_around_in_its_rounds_alone(tmp_path):
    hooks = build_hooks(["poison:1@round=5,rounds=2"], 1, 3, tmp_path)
    poisoned = [
        bool(torch.equal(hooks.pseudo_grad(number, VALUES), VALUES * -10)) for number in range(4, 9)
    ]
    assert poisoned == [False, True, True, False, False]
    assert torch.equal(
        build_hooks(["poison:1@round=5"], 1, 0, tmp_path).pseudo_grad(99, VALUES), VALUES * -10
    )


def flipped_bits(payload: torch.Tensor) -> int:
    return sum(bin(byte).count("1") for byte in (payload ^ PAYLOAD).tolist())


def test_corrupt_flips_one_bit_once_whichever_rank_sends_first(tmp_path):
    ranks = [build_hooks(["corrupt:1@round=4"], 1, rank, tmp_path) for rank in range(2)]
    assert [flipped_bits(hooks.payload(3, PAYLOAD)) for hooks in ranks] == [0, 0]
    assert [flipped_bits(hooks.payload(4, PAYLOAD)) for hooks in reversed(ranks)] == [1, 0]
    assert flipped_bits(ranks[0].payload(4, PAYLOAD)) == 0
    assert PAYLOAD.tolist() == list(range(64))


def test_what_the_launcher_begins_is_done_by_the_running_island(tmp_path):
    (tmp_path / FAULTS_FOLDER).mkdir()
    hooks = build_hooks([], 0, 0, tmp_path)
    assert flipped_bits(hooks.payload(7, PAYLOAD)) == 0
    request_fault(tmp_path, parse_fault("corrupt:0@second=3.5"))
    assert [flipped_bits(hooks.payload(7, PAYLOAD)) for _ in range(2)] == [1, 0]


def test_a_burst_of_slowness_ends_after_its_seconds(tmp_path):
    (tmp_path / FAULTS_FOLDER).mkdir()
    hooks = build_hooks(["slow:0x2"], 0, 0, tmp_path)
    burst = parse_fault("slow:0x3@step=5,seconds=60")
    request_fault(tmp_path, burst)
    assert hooks.slowness() == 6.0
    begun = tmp_path / FAULTS_FOLDER / f"{burst}.begun"
    os.utime(begun, (begun.stat().st_atime, begun.stat().st_mtime - 61))
    assert hooks.slowness() == 2.0


def reach_in_child(folder: Path, specs: list[str], rank: int, round_number: int) -> int:
    """Run all phases of a round in a child process and return its exit code."""
    pid = os.fork()
    if pid == 0:
        hooks = build_hooks(specs, 1, rank, folder)
        for phase in PHASES:
            hooks.reached(phase, round_number)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_an_island_kills_itself_at_its_phase_once_over_all_its_lives(tmp_path):
    spec = "kill:1@round=3,phase=decide"
    assert reach_in_child(tmp_path, [spec], 0, 2) == 0, "not before its round"
    assert reach_in_child(tmp_path, [spec], 1, 3) == 0, "rank 0 does it"
    assert reach_in_child(tmp_path, [spec], 0, 4) == -signal.SIGKILL, (
        "at the first round from then on"
    )
    assert reach_in_child(tmp_path, [spec], 0, 4) == 0, "not again after a restart"


def test_an_island_freezes_itself_until_it_is_woken(tmp_path):
    pid = os.fork()
    if pid == 0:
        build_hooks(["freeze:1@round=0,phase=vote"], 1, 0, tmp_path).reached("vote", 0)
        os._exit(7)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_fault_is_claimed_by_one(tmp_path):
    fault = parse_fault("corrupt:1@round=4")
    assert [claim(tmp_path, fault) for _ in range(3)] == [True, False, False]


def test_a_record_that_was_cut_short_is_left_out(tmp_path):
    record = FaultRecord(
        spec="kill:1@round=3", kind="kill", islands=("island-1",), text="killed island-1"
    )
    record_fault(tmp_path, record)
    with (tmp_path / "faults.jsonl").open("a") as file:
        file.write('{"spec": "kill')
    assert read_faults(tmp_path) == [record]


def test_a_storm_is_the_same_for_the_same_seed_and_another_for_another():
    first, again, other = (list(islice(storm(seed, 2.0, 4), 60)) for seed in (1, 1, 2))
    assert first == again and first != other
    assert [parse_fault(str(fault)) for fault in first] == first


def test_a_storm_has_its_rate_and_all_kinds():
    faults = list(islice(storm(0, 3.0, 5), 2000))
    minutes = (faults[-1].second or 0) / 60
    assert len(faults) / minutes / 5 == pytest.approx(3.0, rel=0.1)
    assert {fault.kind for fault in faults} == {"kill", "freeze", "leave", "slow", "corrupt"}
    assert {name for fault in faults for name in fault.targets} == {0, 1, 2, 3, 4, "bootstrap"}
    assert all(fault.back is not None for fault in faults if fault.kind in ("kill", "leave"))


def test_a_storm_takes_the_only_island_never_down():
    assert not {fault.kind for fault in islice(storm(0, 3.0, 1), 200)} & set(TAKES_DOWN)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill:1@round=2,process=rank2", "island 1 has the ranks 0 to 1 only"),
        ("kill:4@round=2,process=rank2", "island 4 has the ranks 0 to 1 only"),
        ("freeze:0@round=2,process=daemon", "only islands over hivemind have a libp2p daemon"),
    ],
)
def test_a_fault_names_a_process_that_there_will_be(text, says):
    check_processes([parse_fault("kill:1@round=2,process=rank1")], [1, 2], has_daemon=False)
    with pytest.raises(ConfigError, match=says):
        check_processes([parse_fault(text)], [1, 2], has_daemon=False)


def test_a_kill_at_a_phase_may_be_requested_of_an_island_that_runs(tmp_path):
    (tmp_path / FAULTS_FOLDER).mkdir()
    request_fault(tmp_path, parse_fault("kill:1@round=3,phase=reducing"))
    assert reach_in_child(tmp_path, [], 0, 2) == 0, "not before its round"
    assert reach_in_child(tmp_path, [], 0, 3) == -signal.SIGKILL
    assert reach_in_child(tmp_path, [], 0, 3) == 0, "not again after a restart"
