"""The processes of one contestant of `scripts/bench/inner/inner.py`, and the cost of their
steps.
"""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from inner.mesh import Degrees
from scripts.bench.inner.inner_rivals import (
    ModelCase,
    TrainingLoop,
    build_ddp_loop,
    build_our_trainer,
    build_plain_llama,
    build_plain_loop,
    build_transformers_llama,
)

MESHES = {
    "ours": Degrees(),
    "dp2": Degrees(dp_replicate=2),
    "dp2_fsdp": Degrees(dp_replicate=2),
    "fsdp2": Degrees(dp_shard=2),
    "tp2": Degrees(tp=2),
    "tp2_split": Degrees(tp=2),
    "pp2": Degrees(pp=2),
    "cp2": Degrees(cp=2),
    "cp2_fsdp": Degrees(cp=2),
}
PARALLEL: dict[str, dict[str, Any]] = {
    "dp2_fsdp": {"zero": 3},
    "cp2_fsdp": {"zero": 3},
    "tp2": {"sequence_parallel": False},
    "tp2_split": {"sequence_parallel": True},
}
"""Settings of `island.parallel`, where they are not the defaults."""
LOOPS = {
    "plain": build_plain_llama,
    "transformers": build_transformers_llama,
    "plain_x2": build_plain_llama,
}
NUM_IN_DDP = 2
PHASES = ["forward", "backward", "optimizer", "rest"]
ANSWER_SECONDS = 300.0


@dataclass
class StepCost:
    """The cost of one step for one process."""

    loss: float
    cpu_seconds: float
    seconds: float


class ContestantProcesses:
    """All processes of one contestant."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def ask(self, command: str, number: int = 0) -> list[Any]:
        """Send a command to all processes at once and return their answers. Raises RuntimeError."""
        for pipe in self._pipes:
            pipe.send((command, number))
        deadline = time.monotonic() + ANSWER_SECONDS
        return [_answer(pipe, command, deadline) for pipe in self._pipes]


def _answer(pipe: Connection, command: str, deadline: float) -> Any:
    if not pipe.poll(max(deadline - time.monotonic(), 0)):
        raise RuntimeError(f"no answer to {command} within {ANSWER_SECONDS:.0f} s")
    is_good, value = pipe.recv()
    if not is_good:
        raise RuntimeError(f"{command} failed in a process:\n{value}")
    return value


@contextmanager
def start_processes(
    case: ModelCase, what: str, num_processes: int
) -> Iterator[ContestantProcesses]:
    """Start a contestant's processes and build its training loop. They are killed at exit."""
    # CUDA does not survive a fork. On the CPU a fork saves importing torch in each process.
    start = (
        multiprocessing.get_context("fork")
        if case.device == "cpu"
        else multiprocessing.get_context("spawn")
    )
    processes = []
    pipes = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(num_processes):
                mine, theirs = multiprocessing.Pipe()
                process = start.Process(
                    target=_serve, args=(case, what, rank, folder, theirs), daemon=True
                )
                process.start()
                processes.append(process)
                pipes.append(mine)
            built = ContestantProcesses(pipes)
            built.ask("build")
            yield built
        finally:
            for process in processes:
                process.kill()
                process.join()


def _serve(case: ModelCase, what: str, rank: int, folder: str, pipe: Connection) -> None:
    """Answer commands until the process is killed."""
    contestant: TrainingLoop | None = None
    while True:
        command, number = pipe.recv()
        try:
            if contestant is None:
                assert command == "build", f"{command} before build"
                contestant = _build(case, what, rank, folder)
                pipe.send((True, None))
            else:
                pipe.send((True, COMMANDS[command](contestant, number)))
        except BaseException:  # noqa: BLE001 - the parent must learn of any error
            pipe.send((False, traceback.format_exc()))


def _build(case: ModelCase, what: str, rank: int, folder: str) -> TrainingLoop:
    torch.set_num_threads(1)
    if case.device != "cpu":
        torch.cuda.set_device(rank)
    if what in LOOPS:
        return build_plain_loop(case, LOOPS[what](case), share=rank)
    dist.init_process_group(
        "gloo" if case.device == "cpu" else "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=NUM_IN_DDP if what == "ddp2" else MESHES[what].num_ranks,
        timeout=timedelta(seconds=ANSWER_SECONDS),
    )
    if what == "ddp2":
        return build_ddp_loop(case, share=rank)
    return build_our_trainer(case, MESHES[what], PARALLEL.get(what, {}))


def timed_step(contestant: TrainingLoop, number: int) -> StepCost:
    """Make one step and measure its cost."""
    cpu = time.process_time()
    wall = time.perf_counter()
    loss = contestant.step(number)
    _synchronize()
    return StepCost(loss, time.process_time() - cpu, time.perf_counter() - wall)


def split_step(contestant: TrainingLoop, number: int) -> dict[str, float]:
    """Make one step, and return its CPU seconds by phase.

    Each phase is synchronized, so on a GPU their sum exceeds a normal step.
    """
    spent = dict.fromkeys(PHASES, 0.0)
    phase = "rest"
    since = time.process_time()

    def enter(name: str, *_: object) -> None:
        nonlocal phase, since
        _synchronize()
        now = time.process_time()
        spent[phase] += now - since
        phase = name
        since = now

    hooks = [
        contestant.model.register_forward_pre_hook(partial(enter, "forward"), prepend=True),
        contestant.model.register_forward_hook(partial(enter, "rest")),
        contestant.optimizer.register_step_pre_hook(partial(enter, "optimizer")),
        contestant.optimizer.register_step_post_hook(partial(enter, "rest")),
    ]
    backward = Tensor.backward

    def timed_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        enter("backward")
        backward(loss, *args, **kwargs)
        enter("rest")

    setattr(Tensor, "backward", timed_backward)  # noqa: B010 - this process belongs to the benchmark
    contestant.step(number)
    enter("rest")
    setattr(Tensor, "backward", backward)  # noqa: B010
    for hook in hooks:
        hook.remove()
    return spent


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


COMMANDS: dict[str, Callable[[TrainingLoop, int], Any]] = {"step": timed_step, "split": split_step}
