"""Islands as threads of one process compute, bit for bit, what real processes do."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
from torch._dynamo.utils import counters

from diloco.assemble import Runtime
from diloco.config.schema import Config, parse_config
from diloco.errors import ConfigError
from diloco.simulate.in_process import configure_in_process
from diloco.simulate.threads import train_together
from tests.swarm import Island, Swarm, swarm

ONE = {"ranks": 1}
PLAIN = ["outer.codec=int8", "optimizer.schedule=cosine"]
STREAMING = [
    "outer.fragments=2",
    "outer.delay=1",
    "outer.mix=0.5",
    "outer.codec=int4",
    "outer.coding.feedback=0.9",
]
GOSSIP = ["outer.gossip={}", "outer.codec=int8", "outer.rounds=5"]
RECOMPUTING = [
    "island.parallel.recompute=full",
    "island.compute_dtype=bfloat16",
    "optimizer.name=muon",
]


def together(islands: Swarm, live: Any = None) -> Island:
    """Start all islands of the swarm's config in one forked process, with separate folders."""
    config = configure_in_process(islands.config, has_disturbances=False).model_copy(
        update={"name": "together"}
    )

    def work(config: Config, index: int) -> None:
        train_together(config, live) if live else train_together(config)

    return islands.start(0, work, config)


def folder_of(process: Island, index: int) -> Island:
    """The records of island `index` of the process."""
    return Island(process.folder.parent / f"island-{index}", process.ranks)


def trajectory(island: Island) -> list[tuple[Any, ...]]:
    """All numbers in an island's records: steps, committed rounds and held-out losses."""
    steps = [
        ("step", r["step"], r["tokens"], r["loss"], r["grad_norm"]) for r in island.records("step")
    ]
    rounds = [
        (
            "round",
            r["round"],
            r["digest"],
            r["participants"],
            r["tokens"],
            r["pseudo_gradient_norm"],
        )
        for r in island.committed().values()
    ]
    return [*steps, *rounds, *(("eval", r["round"], r["loss"]) for r in island.records("eval"))]


def assert_same_as_real(folder, settings: list[str], num_islands: int) -> None:
    # On a busy machine an island may be late for a round. All are needed, so that the others wait
    # for it.
    needed = [] if "outer.gossip={}" in settings else [f"outer.quorum={num_islands}"]
    with swarm(folder, *settings, *needed, islands=[ONE] * num_islands) as islands:
        real = islands.start_all()
        for island in real:
            island.finish(200)
        process = together(islands)
        process.finish(200)
        for index, island in enumerate(real):
            expected = trajectory(island)
            assert (
                len([line for line in expected if line[0] == "round"])
                == islands.config.outer.num_rounds
            )
            assert trajectory(folder_of(process, index)) == expected, f"island {index}"


@pytest.mark.parametrize(
    ("settings", "num_islands"), [(PLAIN, 3), (STREAMING, 2)], ids=["plain", "streaming"]
)
def test_islands_in_one_process_compute_what_real_processes_do(tmp_path, settings, num_islands):
    assert_same_as_real(tmp_path, settings, num_islands)


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
def test_compiled_islands_in_one_process_share_a_graph_and_learn_what_eager_ones_do(tmp_path):
    def live(parts: Runtime) -> None:
        from diloco import island as life

        life.run(parts)
        (tmp_path / "graphs").write_text(str(counters["stats"]["unique_graphs"]))

    found: dict[str, list[Island]] = {}
    for compiles in ("false", "true"):
        settings = *PLAIN, "outer.rounds=2", f"island.parallel.compile={compiles}"
        with swarm(tmp_path / compiles, *settings, islands=[ONE] * 2) as islands:
            process = together(islands, live)
            process.finish(280)
            found[compiles] = [folder_of(process, index) for index in range(2)]
    # Of a block and of the loss, each for training and for evaluation, although there are two
    # islands.
    assert (tmp_path / "graphs").read_text() == "4"
    digests = [[r["digest"] for r in island.committed().values()] for island in found["true"]]
    assert len(digests[0]) == 2 and digests[1] == digests[0]
    for eager, compiled in zip(found["false"], found["true"], strict=True):
        losses, expected = (
            [r["loss"] for r in island.records("step")] for island in (compiled, eager)
        )
        assert losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("group", [2, 4])
def test_islands_that_gossip_in_one_process_compute_what_real_processes_do(tmp_path, group):
    assert_same_as_real(tmp_path, [*GOSSIP, f"outer.gossip.group={group}"], 4)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [PLAIN, STREAMING], ids=["plain", "streaming"])
def test_thirty_two_islands_in_one_process_compute_what_real_processes_do(tmp_path, settings):
    assert_same_as_real(
        tmp_path, [*settings, "data.seq_len=8", "optimizer.tokens_per_step=128"], 32
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixty_four_islands_train_in_one_process_and_learn(tmp_path):
    settings = [*PLAIN, "data.seq_len=8", "optimizer.tokens_per_step=128", "outer.rounds=4"]
    with swarm(tmp_path, *settings, islands=[ONE] * 64) as islands:
        process = together(islands)
        process.finish(580)
        found = [folder_of(process, index) for index in range(64)]
    for number in range(4):
        rounds = [island.committed()[number] for island in found]
        assert len({r["digest"] for r in rounds}) == 1
        assert all(len(r["participants"]) == 64 for r in rounds)
    losses = [record["loss"] for record in found[0].records("eval")]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_recomputing_and_bfloat16_are_the_same_in_threads(tmp_path):
    assert_same_as_real(tmp_path, RECOMPUTING, 3)


@pytest.mark.slow
def test_an_island_that_is_late_by_more_than_the_grace_is_in_every_round(tmp_path):
    def live(parts: Runtime) -> None:
        from diloco import island as life

        step, is_last = parts.trainer.step, threading.current_thread().name == "island-2"

        def slow(batches):
            # The grace of rounds as short as these is 3 s, on a clock that three islands slow down
            # to a third.
            threading.Event().wait(15.0 if is_last and parts.trainer.inner_step == 8 else 0.0)
            return step(batches)

        parts.trainer.step = slow
        life.run(parts)

    with swarm(tmp_path, "outer.rounds=5", islands=[ONE] * 3) as islands:
        process = together(islands, live)
        process.finish()
        for index in range(3):
            rounds = folder_of(process, index).committed().values()
            assert [r["steps"] for r in rounds] == [2] * 5
            assert all(len(r["participants"]) == 3 for r in rounds)


def test_islands_of_one_process_evaluate_their_global_params_once(tmp_path):
    def live(parts: Runtime) -> None:
        from diloco import island as life

        evaluate = parts.trainer.evaluate

        def counted(windows):
            with (tmp_path / "evaluations").open("a") as file:
                file.write("1")
            return evaluate(windows)

        parts.trainer.evaluate = counted
        life.run(parts)

    with swarm(tmp_path, "outer.rounds=3", islands=[ONE] * 3) as islands:
        process = together(islands, live)
        process.finish()
        losses = [
            [record["loss"] for record in folder_of(process, i).records("eval")] for i in range(3)
        ]
    assert losses[0] == losses[1] == losses[2]
    assert len((tmp_path / "evaluations").read_text()) == len(losses[0]) == 4


def test_when_an_island_fails_the_process_ends_with_its_error(tmp_path):
    def live(parts: Runtime) -> None:
        from diloco import island as life

        if threading.current_thread().name == "island-1":
            raise RuntimeError("no more")
        life.run(parts)

    with swarm(tmp_path, islands=[ONE] * 2) as islands:
        process = together(islands, live)
        assert process.wait() == [1]
        assert "island-1 ERROR this island has failed: no more" in process.log


def test_sigterm_ends_all_islands_within_seconds(tmp_path):
    with swarm(tmp_path, "outer.rounds=5000", islands=[ONE] * 2) as islands:
        process = together(islands)
        folder_of(process, 1).wait_for_round(1)
        process.signal(signal.SIGTERM)
        assert process.wait(60) == [128 + signal.SIGTERM]
        for index in range(2):
            assert folder_of(process, index).events("left") == ["stopped by a signal"]


@pytest.mark.parametrize(
    ("override", "cure"),
    [
        (
            "islands=[{ranks: 1}, {ranks: 2}]",
            "island-1: island.ranks is 2; here an island has one rank",
        ),
        ("outer.local_steps=dynamic", "use fixed"),
        ("outer={local_steps: timed, round_seconds: 5}", "use fixed, without outer.round_seconds"),
        ("island.wandb=offline", "use island.tensorboard"),
        ("island.profile={steps: [1, 2]}", "set steps to null"),
        ("island.faults=['slow:0x3']", "leave them out"),
        (
            "islands=[{device: cpu}, {device: cuda}]",
            "island-1: island.device is 'cuda', island-0 has 'cpu'",
        ),
    ],
)
def test_what_needs_a_process_of_its_own_is_refused_with_a_cure(override, cure):
    with pytest.raises(ConfigError, match="--in-process") as caught:
        configure_in_process(parse_config("islands: [{}, {}]", [override]), has_disturbances=False)
    assert cure in str(caught.value)


def test_a_fault_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "config.yaml").write_text("islands: [{}, {}]")
    command = [
        "simulate",
        str(tmp_path / "config.yaml"),
        "--in-process",
        "--fault",
        "kill:1@round=3",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "diloco", *command], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "--fault, --storm, --netns, --nat and --link" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_command_makes_a_run_that_has_a_report(tmp_path):
    with swarm(tmp_path, islands=[ONE]) as islands:
        (tmp_path / "config.yaml").write_text(json.dumps(islands.config.model_dump(mode="json")))
    command = ["simulate", str(tmp_path / "config.yaml"), "--in-process", "--islands", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "diloco", *command], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "test" / "report.html").exists()
    summary = json.loads((tmp_path / "test" / "summary.json").read_text())
    assert "island-2" in json.dumps(summary)
