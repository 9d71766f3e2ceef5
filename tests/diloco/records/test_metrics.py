"""Records: what is written is what is read, also after a kill, and the sinks get the same
numbers.
"""

import doctest
import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.config.schema import IslandConfig
from diloco.records import metrics as metrics_module
from diloco.records.faults import FaultRecord, read_faults, record_fault
from diloco.records.figures import LatestRecords
from diloco.records.metrics import EvalRecord, EventRecord, Metrics, Record, RoundRecord, StepRecord
from diloco.records.run_folder import RunFacts, Tail, natural_key, read_facts, read_run, write_facts
from diloco.records.sinks import build_sinks
from inner.errors import InputError
from outer.leases.ledger import Ledger
from outer.report import RoundReport
from tests.diloco.sample_records import a_round, a_step
from tests.harness import run_ranks

ROOT = Path(__file__).parents[3]


def write_one_of_each(metrics: Metrics) -> list[Record]:
    step, round_, event = a_step(), a_round(), EventRecord(name="joined", text="at round 3")
    evaluation = EvalRecord(round=0, tokens=1024, loss=2.25, bits_per_byte=3.2)
    metrics.write(step)
    metrics.write(round_)
    metrics.write(evaluation)
    metrics.write(event)
    metrics.close()
    return [step, round_, evaluation, event]


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    written = write_one_of_each(Metrics(tmp_path / "island-0" / "metrics.jsonl"))
    assert Tail(tmp_path / "island-0" / "metrics.jsonl").new_records() == written


def test_the_example_in_the_docstring_of_a_sink_runs() -> None:
    assert doctest.testmod(metrics_module) == (0, 4)


@pytest.mark.parametrize("is_committed", [True, False])
def test_the_record_of_an_attempt_has_all_that_the_report_says(is_committed: bool) -> None:
    report = RoundReport(
        round=3,
        attempt=1,
        participants=["island-0", "island-1", "island-2"],
        is_committed=is_committed,
        digest="ab12",
        base="cd34",
        units=(range(1, 13, 3),),
        bytes_sent=1000,
        bytes_received=900,
        reduce_seconds=0.5,
        wait_seconds=0.1,
        pseudo_grad_norm=1.5,
        gated={"island-2": 4},
        cause="" if is_committed else "island 'island-1' is lost",
        is_own=True,
        listeners=["island-2"],
        planner="island-1",
    )
    ledger = Ledger(frontier=9, returned=(range(7, 9),))
    record = RoundRecord.from_report(report, steps=5, tokens=640, waited_seconds=2.0, ledger=ledger)
    assert record == RoundRecord(
        round=3,
        attempt=1,
        participants=("island-0", "island-1", "island-2"),
        committed=is_committed,
        digest="ab12",
        bytes_sent=1000,
        bytes_received=900,
        reduce_seconds=0.5,
        wait_seconds=0.1,
        pseudo_gradient_norm=1.5,
        cause=None if is_committed else "island 'island-1' is lost",
        is_own=True,
        steps=5,
        tokens=640,
        stalled_seconds=2.0 if is_committed else 0.0,
        gated={"island-2": 4},
        base="cd34",
        units=[[1, 4, 3]],
        trained_units=7,
        open_units=2,
        listeners=("island-2",),
        planner="island-1",
        time=record.time,
    )


def test_each_line_is_an_object_with_kind_and_time(tmp_path: Path) -> None:
    write_one_of_each(Metrics(tmp_path / "metrics.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["step", "round", "eval", "event"]
    assert all(line["time"] > 1e9 for line in lines)


def test_inf_and_nan_are_written_as_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(a_step(loss=math.nan, grad_norm=math.inf))
    metrics.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (line["loss"], line["grad_norm"]) == (None, None)


def test_a_tail_gives_each_record_once_and_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.new_records() == []
    metrics = Metrics(path)
    metrics.write(a_step(1))
    assert [r.step for r in tail.new_records() if isinstance(r, StepRecord)] == [1]
    metrics.write(a_step(2))
    metrics.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert tail.new_records() == []
    path.write_bytes(whole)
    assert [r.step for r in tail.new_records() if isinstance(r, StepRecord)] == [2]


def test_a_restart_after_a_truncated_line_loses_only_that_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Metrics(path)
    first.write(a_step(1))
    first.write(a_step(2))
    first.close()
    path.write_bytes(path.read_bytes()[:-20])
    again = Metrics(path)
    again.write(a_step(3))
    again.close()
    tail = Tail(path)
    assert [r.step for r in tail.new_records() if isinstance(r, StepRecord)] == [1, 3]


def test_lines_that_are_no_record_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'[]\n\xff\xfe\n{"kind": "novel"}\n{"kind": "step", "step": "many"}\n\n')
    tail = Tail(path)
    assert tail.new_records() == []


def test_a_killed_process_leaves_every_line_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import sys; from pathlib import Path; from diloco.records.metrics import EventRecord, "
        "Metrics\n"
        f"metrics = Metrics(Path({str(path)!r}))\n"
        "for number in range(100): metrics.write(EventRecord(name=str(number)))\n"
        "sys.stdout.write('written\\n'); sys.stdout.flush(); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)
    assert [r.name for r in Tail(path).new_records() if isinstance(r, EventRecord)] == [
        str(number) for number in range(100)
    ]


def test_facts_are_read_back_and_unknown_keys_ignored(tmp_path: Path) -> None:
    facts = RunFacts(
        name="quick",
        num_params=1000,
        num_islands=2,
        total_steps=60,
        bigram_loss=2.4,
        created="2026-01-02T03:04:05+00:00",
    )
    write_facts(tmp_path, facts)
    assert read_facts(tmp_path) == facts
    values = json.loads((tmp_path / "run.json").read_text()) | {"tokenizer": "bytes"}
    (tmp_path / "run.json").write_text(json.dumps(values))
    assert read_facts(tmp_path) == facts


def test_no_facts_is_none_and_damaged_facts_name_the_key(tmp_path: Path) -> None:
    assert read_facts(tmp_path) is None
    (tmp_path / "run.json").write_text(
        '{"name": "quick", "num_params": "many", "num_islands": 2, "total_steps": 1}'
    )
    with pytest.raises(InputError, match=r"run\.json is damaged: num_params: .*Delete it"):
        read_facts(tmp_path)


def test_a_folder_without_a_run_says_what_was_looked_for_and_found(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(InputError, match=r"looked for .*ISLAND/metrics.jsonl, found notes.txt"):
        read_run(tmp_path)
    with pytest.raises(InputError, match="there is no such folder"):
        read_run(tmp_path / "absent")


def test_islands_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("island-10", "island-2"):
        write_one_of_each(Metrics(tmp_path / name / "metrics.jsonl"))
    run = read_run(tmp_path)
    assert [island.name for island in run.islands] == ["island-2", "island-10"]
    assert [
        len(getattr(run.islands[0], kind)) for kind in ("steps", "rounds", "evals", "events")
    ] == [1, 1, 1, 1]
    assert sorted(["b", "island-10", "9", "island-9"], key=natural_key) == [
        "9",
        "b",
        "island-9",
        "island-10",
    ]


def test_without_sinks_none_is_built_and_none_is_imported(tmp_path: Path) -> None:
    assert build_sinks(IslandConfig(), tmp_path, run_name="quick", settings={}) == []
    program = (
        "import sys, diloco.records.sinks, diloco.records.run_folder; "
        "print({'torch', 'wandb', 'tensorboard'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=True
    )
    assert result.stdout == b"set()\n"


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = build_sinks(IslandConfig(tensorboard=True), tmp_path, run_name="quick", settings={})
    write_one_of_each(Metrics(tmp_path / "metrics.jsonl", sinks))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(s.step, s.value) for s in events.Scalars("step/loss")] == [(1, 2.5)]
    assert [(s.step, s.value) for s in events.Scalars("round/participants")] == [(0, 2.0)]
    assert [(s.step, s.value) for s in events.Scalars("eval/loss")] == [(0, 2.25)]
    assert "round/digest" not in events.Tags()["scalars"]


def test_wandb_offline_writes_into_the_run_folder_and_starts_nothing_that_sends(
    tmp_path: Path,
) -> None:
    # In a process of its own: threads that wandb leaves must not be in the one that tests fork.
    program = (
        "import sys; from pathlib import Path; from diloco.config.schema import IslandConfig; "
        "from diloco.records.metrics import Metrics; from diloco.records.sinks import build_sinks; "
        "from tests.diloco.records.test_metrics import write_one_of_each; folder = "
        "Path('island-0'); "
        "sinks = build_sinks(IslandConfig(wandb='offline'), folder, run_name='quick', "
        "settings={'seed': 1}); "
        "write_one_of_each(Metrics(folder / 'metrics.jsonl', sinks)); "
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, timeout=120, check=True
    )
    assert result.stdout == b"[]\n"
    (log,) = tmp_path.glob("island-0/wandb/offline-run-*/*.wandb")
    content = log.read_bytes()
    assert b"step/loss" in content
    assert b"eval/bits_per_byte" in content
    assert os.listdir(tmp_path) == ["island-0"]


def test_wandb_without_an_account_is_refused_with_the_cure(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from diloco.errors import ConfigError; "
        "from diloco.config.schema import IslandConfig; "
        "from diloco.records.sinks import build_sinks\n"
        "try: build_sinks(IslandConfig(wandb='online'), Path('island-0'), run_name='quick', "
        "settings={})\n"
        "except ConfigError as error: print(error)"
    )
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, timeout=120, check=True
    )
    assert result.stdout.startswith(
        b"island.wandb: got 'online', and wandb cannot start: No API key configured"
    )
    assert b"set island.wandb=offline" in result.stdout


def records_on_a_disk_that_fills_up(rank: int, path: Path) -> None:
    """Two records fit, half of a third; then none; then there is room again."""
    metrics = Metrics(path)
    metrics.write(a_step(1))
    size = path.stat().st_size
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size + size // 2, resource.RLIM_INFINITY))
    for number in range(2, 6):
        metrics.write(a_step(number))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for number in (6, 7):
        metrics.write(a_step(number))
    metrics.close()


def test_records_that_find_no_room_are_lost_and_those_after_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run_ranks(records_on_a_disk_that_fills_up, 1, path)
    tail = Tail(path)
    assert [record.step for record in tail.new_records() if isinstance(record, StepRecord)] == [
        1,
        2,
        6,
        7,
    ]


def test_a_full_disk_is_said_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    metrics = Metrics(path)
    for number in range(3):
        metrics.write(a_step(number))
    (said,) = caplog.messages
    assert "No space left on device" in said and "training goes on" in said


LARGEST_BYTES = 34_000
"""More than 100 steps take in metrics.jsonl, and less than TensorBoard needs for them."""


def steps_with_a_tensorboard_that_finds_no_room(rank: int, folder: Path) -> None:
    """Its file, which holds more of a step than metrics.jsonl does, reaches the size that no file
    may have.
    """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_BYTES, resource.RLIM_INFINITY))
    sinks = build_sinks(IslandConfig(tensorboard=True), folder, run_name="quick", settings={})
    metrics = Metrics(folder / "metrics.jsonl", sinks)
    for number in range(100):
        metrics.write(a_step(number))
    metrics.close()


def test_a_sink_that_fails_does_not_end_the_training(tmp_path: Path) -> None:
    run_ranks(steps_with_a_tensorboard_that_finds_no_room, 1, tmp_path)
    records = Tail(tmp_path / "metrics.jsonl").new_records()
    assert [record.step for record in records if isinstance(record, StepRecord)] == list(range(100))
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.stat().st_size == LARGEST_BYTES, "the sink has found no room"


def test_records_begin_when_their_file_can_be_opened_and_sinks_get_all(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "island-0" / "metrics.jsonl"
    path.mkdir(parents=True)
    latest = LatestRecords("island-0")
    metrics = Metrics(path, [latest])
    for number in (1, 2):
        metrics.write(a_step(number))
    assert len(caplog.messages) == 1 and "records are lost; training goes on" in caplog.messages[0]
    assert latest.figures.step == 2
    path.rmdir()
    metrics.write(a_step(3))
    metrics.close()
    assert [
        record.step for record in Tail(path).new_records() if isinstance(record, StepRecord)
    ] == [3]
    assert caplog.messages[1:] == [f"{path}: can be written again; 2 records are missing from it"]


def test_a_record_that_is_no_json_is_lost_and_the_next_one_is_not(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(
        EvalRecord(round=0, tokens=1, loss=2.0, bits_per_byte=3.0, source_losses={"a": math.nan})
    )
    metrics.write(a_step(2))
    metrics.close()
    (record,) = Tail(tmp_path / "metrics.jsonl").new_records()
    assert isinstance(record, StepRecord) and record.step == 2


def test_a_sink_that_cannot_start_is_one_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "tensorboard").write_text("in its way")
    assert (
        build_sinks(IslandConfig(tensorboard=True), tmp_path, run_name="quick", settings={}) == []
    )
    (said,) = caplog.messages
    assert said.startswith("nothing is written for TensorBoard") and said.endswith(
        "training goes on"
    )


def test_a_fault_that_is_not_recorded_whole_is_left_out(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    fault = FaultRecord(spec="kill:1", kind="kill", islands=("island-1",), text="killed")
    record_fault(tmp_path, fault)
    with (tmp_path / "faults.jsonl").open("a") as file:
        file.write('{"spec": "kil\n[]\n')
    record_fault(tmp_path, fault)
    assert read_faults(tmp_path) == [fault, fault]
    record_fault(tmp_path / "nowhere", fault)
    (said,) = caplog.messages
    assert "faults.jsonl lacks kill:1" in said
