"""scripts/bench/wallclock/wallclock.py: its evaluation of records, and the script as a user runs it
(needs root).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from diloco.assemble import build_trainer
from diloco.config.schema import Config
from diloco.network_emulation.namespaces import PREFIX
from diloco.records.metrics import EvalRecord, Metrics, Record
from diloco.records.run_folder import IslandRecords
from diloco.runtime.corpus import load_corpus
from diloco.train import train_data_parallel
from inner.config import MeshConfig
from scripts.bench.wallclock.wallclock_machine import train
from scripts.bench.wallclock.wallclock_rivals import GlobalParams, Machine, Rival, build_fragments
from scripts.bench.wallclock.wallclock_runs import build_curve, seconds_to
from tests.harness import run_ranks
from tests.inner.small import SIZES, build_model
from tests.swarm import TEXT, Swarm

ROOT = Path(__file__).parents[2]
RUN_SECONDS = 800
TINY = [
    "model.preset=null",
    "model={dim: 32, num_layers: 4, num_heads: 4, num_kv_heads: 2, ffn_dim: 64}",
]
TINY += [
    "data.seq_len=32",
    "data.heldout_fraction=0.3",
    "optimizer.tokens_per_step=128",
    "evaluate.tokens=512",
]


def test_a_loss_is_reached_between_the_measurements_above_and_below_it():
    curve = [(10.0, 3.0), (20.0, 2.0), (30.0, 2.5), (40.0, 1.0)]
    assert seconds_to(curve, 2.25) == 17.5
    assert seconds_to(curve, 2.0) == 20.0
    assert seconds_to(curve, 1.75) == 35.0
    assert seconds_to(curve, 3.5) == 10.0
    assert seconds_to(curve, 0.5) is None


def test_a_loss_counts_when_the_last_machine_has_measured_it_and_an_untrained_model_does_not():
    def record(number: int, loss: float, time: float) -> EvalRecord:
        return EvalRecord(round=number, tokens=0, loss=loss, bits_per_byte=None, time=time)

    fast = IslandRecords(
        "island-0", evals=[record(0, 5.5, 99.0), record(2, 3.0, 108.0), record(4, 2.0, 116.0)]
    )
    slow = IslandRecords(
        "island-1", evals=[record(0, 5.5, 101.0), record(2, 3.0, 109.0), record(4, 2.0, 115.0)]
    )
    assert build_curve([fast, slow], 100.0) == [(9.0, 3.0), (16.0, 2.0)]


def test_the_loop_of_the_rivals_trains_what_our_trainer_trains(tmp_path: Path):
    """Two ranks with DistributedDataParallel, each step in four micro-batches, beside two replicas
    of our trainer.
    """
    config = Swarm(tmp_path, ["outer.rounds=2"], [{}, {}], "").config
    load_corpus(config.run, config.for_island(0))
    for theirs, ours in run_ranks(train_both, 2, config):
        assert theirs == pytest.approx(ours, rel=1e-5) and len(ours) == 2


def train_both(rank: int, config: Config) -> list[list[float]]:
    """Held-out losses of the rival and of our trainer."""
    machine = Machine(config.run, config.for_island(0), rank, 2)
    model = DistributedDataParallel(machine.model)
    theirs, ours = Losses(), Losses()
    train(
        machine,
        Rival(model, no_sync=model.no_sync, is_data_parallel=True),
        Metrics(Path(os.devnull), [theirs]),
    )
    island = config.for_island(0).model_copy(
        update={"ranks": 2, "mesh": MeshConfig(dp_replicate=2, dp_shard=1)}
    )
    trainer = build_trainer(config.run, island, machine.corpus, "cpu", num_islands=2)
    train_data_parallel(
        config.run, island, machine.corpus, trainer, 2, Metrics(Path(os.devnull), [ours])
    )
    return [theirs.held_out, ours.held_out]


class Losses:
    """A sink that keeps held-out losses."""

    def __init__(self) -> None:
        self.held_out: list[float] = []

    def write(self, record: Record) -> None:
        if isinstance(record, EvalRecord) and record.loss is not None:
            self.held_out.append(record.loss)

    def close(self) -> None: ...


def test_the_fragments_of_a_rival_cover_each_parameter_once():
    model = build_model()
    names = [name for fragment in build_fragments(model) for name, _ in fragment.named_parameters()]
    params = [param for fragment in build_fragments(model) for param in fragment.parameters()]
    assert len(build_fragments(model)) == SIZES.num_layers + 1 and len(names) == len(params)
    assert sorted(map(id, params)) == sorted(map(id, model.parameters()))


def test_a_rival_is_evaluated_with_the_params_after_the_last_outer_step_and_goes_on_with_its_own():
    model = nn.Linear(2, 1, bias=False)
    outer = SGD(model.parameters(), lr=1.0)
    shared = GlobalParams(model, [outer])
    model.weight.grad = torch.ones_like(model.weight)
    outer.step()
    agreed = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 5
    local = model.weight.detach().clone()
    with shared.applied():
        assert torch.equal(model.weight, agreed)
    assert torch.equal(model.weight, local)


def bench(folder: Path) -> str:
    """Output of the script for two rows of two rounds."""
    command = [
        sys.executable,
        "-m",
        "scripts.bench.wallclock.wallclock",
        "--rows",
        "data-parallel,averaging",
        "--rounds",
        "2",
    ]
    command += ["--loss", "9", "--out", str(folder), "--plot", str(folder / "plot.png"), *TINY]
    command += [
        "data.source=files",
        f"data.paths=[{folder / 'text'}]",
        f"island.cache_dir={folder / 'cache'}",
    ]
    with subprocess.Popen(
        [*command, "evaluate.every_rounds=1"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as started:
        printed, _ = started.communicate(timeout=RUN_SECONDS)
    assert started.returncode == 0, printed
    left = subprocess.run(
        ["ip", "netns", "list"], check=True, capture_output=True, text=True
    ).stdout
    assert f"{PREFIX}-{started.pid}-" not in left
    return printed


@pytest.mark.slow
@pytest.mark.timeout(RUN_SECONDS + 60)
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_each_row_trains_behind_links_is_timed_and_is_not_run_twice(tmp_path: Path):
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"# file {number}\n" + TEXT * 8)
    first, second = bench(tmp_path), bench(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == ["data-parallel", "averaging"], (
        "the second call has run nothing"
    )
    for line in lines:
        assert line["num_steps"] == 20 and len(line["curve"]) == 2, line
        assert 0 < line["curve"][0][0] < line["curve"][1][0]
    data_parallel, averaging = lines
    assert data_parallel["curve"][1][1] == pytest.approx(averaging["curve"][1][1], rel=0.2), (
        "both train the same model"
    )
    assert data_parallel["sent_bytes"] > 5 * averaging["sent_bytes"], (
        "20 all-reduces against 2 rounds"
    )
    assert "plain averaging every 10 steps, fp32" in first and "never" not in first
    assert "averaging, seed 0: " in first and "averaging, seed 0: " not in second
    assert (tmp_path / "plot.png").stat().st_size > 10_000
