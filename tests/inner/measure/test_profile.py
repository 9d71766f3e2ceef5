import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from inner.config import ProfileConfig
from inner.measure.profile import Profiler
from inner.mesh import Degrees
from tests.harness import run_ranks
from tests.inner import small

NUM_STEPS = 5


def _train(rank: int, folder: Path) -> dict[str, Any]:
    """Three runs of five steps: without a profile, with one of steps 2 and 3, and with one cut
    short by an error.
    """
    trainer = small.build_trainer(Degrees(dp_shard=2))
    window = small.share(trainer, small.batch(0))

    def run(
        config: ProfileConfig, name: str, steps_done: int = 0, fails_after: int = 0
    ) -> list[bool]:
        was_on = []
        with Profiler(config, folder / name, rank, steps_done) as profiler:
            for number in range(NUM_STEPS):
                was_on.append(torch.autograd._profiler_enabled())
                trainer.step(window)
                if number + 1 == fails_after:
                    raise RuntimeError("a step failed")
                profiler.step()
        return was_on

    with pytest.raises(RuntimeError, match="a step failed"):
        run(ProfileConfig(steps=(2, 4)), "cut", fails_after=2)
    return {
        "off": run(ProfileConfig(), "off"),
        "on": run(ProfileConfig(steps=(2, 3), memory=True), "on"),
        "resumed": run(ProfileConfig(steps=(11, 12)), "resumed", steps_done=10),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def was_on(folder) -> list[dict[str, list[bool]]]:
    """Whether the tracer recorded at the start of each step, by rank and run."""
    return run_ranks(_train, 2, folder)


@pytest.fixture(scope="module")
def trace(folder, was_on) -> dict[str, Any]:
    return _read(folder / "on" / "rank1.2.pt.trace.json.gz")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def _names(trace: dict[str, Any]) -> set[str]:
    return {event.get("name", "") for event in trace["traceEvents"]}


def _steps(trace: dict[str, Any]) -> set[str]:
    return {name for name in _names(trace) if name.startswith("ProfilerStep#")}


def test_without_steps_nothing_is_recorded_or_written(folder, was_on):
    assert was_on[0]["off"] == [False] * NUM_STEPS
    assert not (folder / "off").exists()


def test_only_the_chosen_steps_are_recorded(was_on, trace):
    assert was_on[0]["on"] == [False, True, True, False, False]
    assert _steps(trace) == {"ProfilerStep#2", "ProfilerStep#3"}


def test_collectives_are_named(trace):
    # gloo has no name of its own for a reduce-scatter.
    assert {"gloo:all_gather", "gloo:all_reduce", "c10d::_reduce_scatter_base_"} <= _names(trace)


def test_each_rank_writes_a_trace_that_says_which_rank_it_is(folder, trace):
    assert trace["distributedInfo"]["rank"] == 1
    assert trace["distributedInfo"]["world_size"] == 2
    assert _read(folder / "on" / "rank0.2.pt.trace.json.gz")["distributedInfo"]["rank"] == 0


def test_the_use_of_memory_is_listed(folder, trace):
    with (folder / "on" / "rank1.2.memory.csv").open() as file:
        rows = list(csv.DictReader(file))
    totals = [int(row["bytes_since_start"]) for row in rows]
    assert any(int(row["bytes"]) < 0 for row in rows)
    assert max(totals) > 0
    assert {"aten::mm", "FSDP::all_gather_copy_out"} <= {
        row["operation"].split(" ")[0] for row in rows
    }


def test_steps_are_counted_from_the_start_of_the_run(folder, was_on):
    assert was_on[0]["resumed"] == [True, True, False, False, False]
    assert _steps(_read(folder / "resumed" / "rank0.11.pt.trace.json.gz")) == {
        "ProfilerStep#11",
        "ProfilerStep#12",
    }


def test_an_error_leaves_the_trace_of_the_steps_before_it(folder, was_on):
    assert _steps(_read(folder / "cut" / "rank0.2.pt.trace.json.gz")) == {"ProfilerStep#2"}


@pytest.mark.parametrize("steps", [(0, 1), (3, 2)])
def test_steps_that_are_no_range_are_refused(steps):
    with pytest.raises(ValidationError, match="first <= last"):
        ProfileConfig(steps=steps)


def test_a_profile_that_cannot_be_written_does_not_end_the_training(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "profile").write_text("in its way")
    steps = 0
    with Profiler(ProfileConfig(steps=(1, 2)), tmp_path / "profile", 0) as profiler:
        for _ in range(4):
            torch.ones(2) + 1
            profiler.step()
            steps += 1
    assert steps == 4 and not torch.autograd._profiler_enabled()
    (said,) = caplog.messages
    assert "no profile could be made" in said and said.endswith("training goes on")
