"""One machine of a rival in scripts/bench/wallclock/wallclock.py: a plain loop on a run's model and
text.

    python -m scripts.bench.wallclock.wallclock_machine ddp|torchft|torchft-streaming CONFIG
        [section.key=value ...]

ddp averages gradients in every step with torch's DistributedDataParallel; the others are torchft's
DiLoCo (wallclock_torchft.py). All have the run's optimizer. Rank, number of machines and the first
machine's address come from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, the machine's own address
from HOST. Steps, rounds and held-out losses are recorded in the format of islands and of the
data-parallel baseline.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from diloco.config.schema import load_config
from diloco.records.metrics import EvalRecord, Metrics, RoundRecord, StepRecord
from diloco.records.run_folder import BASELINE, METRICS
from diloco.watchdog.signals import end_with_parent
from inner.data.batches import heldout_windows
from inner.data.micro_batch import Cutter, num_targets
from inner.model.single_process import summed_loss
from inner.optim.learning_rate import lr_at, set_lr
from scripts.bench.wallclock.wallclock_rivals import Machine, Rival, open_ddp


def train(machine: Machine, rival: Rival, metrics: Metrics) -> None:
    """Make all steps of the run and record them. Every machine calls it together."""
    run = machine.run
    params = list(machine.model.parameters())
    read = build_reader(machine, rival)
    for step in range(run.total_steps):
        windows = read(step)
        started_at = time.time()
        loss, tokens = backward(machine, rival, windows)
        clip = run.optimizer.clip_norm
        norm = nn.utils.clip_grad_norm_(params, float("inf") if clip is None else clip).item()
        lr = lr_at(step, run.total_steps, run.optimizer)
        set_lr([machine.optimizer], lr)
        machine.optimizer.step()
        ended_at = time.time()
        seconds = machine.stepped_at - started_at
        machine.optimizer.zero_grad()
        metrics.write(
            StepRecord(
                step=step + 1,
                tokens=tokens * (step + 1),
                loss=loss,
                lr=lr,
                grad_norm=norm,
                seconds=seconds,
                tokens_per_second=tokens / seconds,
                time=machine.stepped_at,
            )
        )
        if not rival.is_data_parallel:
            metrics.write(build_round(step, ended_at - machine.stepped_at))
        evaluate_if_due(machine, rival, step + 1, metrics)


def build_reader(machine: Machine, rival: Rival) -> Callable[[int], list[torch.Tensor]]:
    """Return a function that reads this machine's micro-batches of a step.

    Together, the machines of either kind of rival read the same sequences.
    """
    size = machine.island.micro_batch
    rank = machine.rank
    count = machine.count
    if rival.is_data_parallel:
        shared = machine.batches(1)
        return lambda step: shared.micro_batches(step, rank, count, size)
    own = machine.batches(count)
    return lambda step: own.micro_batches(step * count + rank, 0, 1, size)


def backward(machine: Machine, rival: Rival, windows: list[torch.Tensor]) -> tuple[float, int]:
    """Accumulate the gradients of the mean loss over this machine's windows.

    Return that loss and the number of tokens.
    """
    seq_len = machine.run.data.seq_len
    cut = Cutter(torch.arange(seq_len), seq_len, eos_of(machine))
    tokens = sum(map(num_targets, windows))
    total = 0.0
    for number, window in enumerate(windows):
        batch = cut(window)
        with nullcontext() if number == len(windows) - 1 else rival.no_sync():
            loss_sum = rival.forward(
                batch.tokens_BS, targets_BS=batch.targets_BS, packing=batch.packing
            )
            loss = loss_sum / tokens
            loss.backward()
        total += loss.item()
    return total, tokens


def eos_of(machine: Machine) -> int | None:
    """Return the token that ends a document, if attention must stay within documents, else None."""
    return machine.corpus.eos_id if machine.run.data.document_mask else None


def build_round(step: int, stalled_seconds: float) -> RoundRecord:
    """Return the record of what stalled an island after a step: a round, its launch, or nothing."""
    return RoundRecord(
        round=step,
        attempt=0,
        participants=(),
        committed=True,
        digest="",
        bytes_sent=0,
        bytes_received=0,
        reduce_seconds=stalled_seconds,
        wait_seconds=0.0,
        pseudo_gradient_norm=None,
        stalled_seconds=stalled_seconds,
    )


def evaluate_if_due(machine: Machine, rival: Rival, num_steps: int, metrics: Metrics) -> None:
    """Evaluate the global params at the steps at which islands would.

    Machines that train together share the work.
    """
    run = machine.run
    cycle, rest = divmod(num_steps, run.outer.inner_steps)
    if rest or (cycle % run.evaluate.every_rounds and num_steps < run.total_steps):
        return
    rank, count = (machine.rank, machine.count) if rival.is_data_parallel else (0, 1)
    size = machine.island.micro_batch
    windows = heldout_windows(
        machine.corpus, run.data.seq_len, run.evaluate.tokens, rank, count, size
    )
    with rival.global_params():
        sums = torch.tensor(
            summed_loss(machine.model, windows, run.data.seq_len, eos_of(machine)),
            dtype=torch.float64,
        )
    if rival.is_data_parallel:
        dist.all_reduce(sums)
    loss, tokens = sums.tolist()
    metrics.write(EvalRecord(round=cycle, tokens=num_steps, loss=loss / tokens, bits_per_byte=None))


def main() -> None:
    """Train on this machine."""
    kind, path, *overrides = sys.argv[1:]
    end_with_parent()
    torch.set_num_threads(1)
    config = load_config(path, overrides)
    rank = int(os.environ["RANK"])
    machine = Machine(config.run, config.for_island(rank), rank, int(os.environ["WORLD_SIZE"]))
    try:
        with open_rival(kind, machine) as rival:
            train(machine, rival, Metrics(metrics_path(machine, rival)))
    except Exception:  # noqa: BLE001 - the bench shows any error
        traceback.print_exc()
        os._exit(1)
    # gloo's threads sometimes abort during a normal interpreter shutdown.
    os._exit(0)


def metrics_path(machine: Machine, rival: Rival) -> Path:
    """Return the file in which this machine records.

    If machines make each step together, only the first one records.
    """
    if rival.is_data_parallel and machine.rank:
        return Path(os.devnull)
    name = BASELINE if rival.is_data_parallel else machine.island.label
    return Path(machine.island.run_dir) / machine.run.name / name / METRICS


def open_rival(kind: str, machine: Machine) -> AbstractContextManager[Rival]:
    """Open the rival of this kind. Only a Python with torchft can open torchft's rivals."""
    if kind == "ddp":
        return open_ddp(machine)
    from scripts.bench.wallclock.wallclock_torchft import open_torchft

    return open_torchft(machine, is_streaming=kind == "torchft-streaming")


if __name__ == "__main__":
    main()
