"""All islands of a run as threads of this process, over a hub: what `diloco simulate --in-process` starts.

Each island has what it would have in a process of its own, built in turn: a model and optimizers on a mesh of one
rank, a thread that trains, a thread for a round behind it, metrics. Shared are the corpus's pages, torch's world of one
rank, the hub, one event loop, and the processors: only so many islands compute at a time as there are.

No bit depends on who computes when. Weights and data follow from seeds with generators of their own, torch's
generator is never drawn from, a reduce adds in the order of the plan, and every plan has all islands. They may wait
long for a turn, so the event loop's clock is as much slower as they are many: no deadline passes, and as many calls are
made a second as by one island for each other.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from torch import Tensor

from diloco import island as life
from diloco.assemble import Parts, Shared, assembled, device_of, process_group
from diloco.config import Config, IslandConfig
from diloco.initial import with_hash
from diloco.signals import end_with_parent, on_stop
from inner.trainer import StepResult, Trainer
from outer.loop import LoopThread
from outer.transports.loopback import Hub

log = logging.getLogger(__name__)


def train_together(config: Config, live: Callable[[Parts], None] = life.run) -> None:
    """Run all of the config's islands until the run is over. Raises what the first that fails has raised."""
    start_logging()
    end_with_parent()
    run, islands = config.run, [config.for_island(index) for index in range(len(config.islands))]
    running: list[Parts] = []
    on_stop(lambda: say_goodbye(running))
    device = device_of(islands[0])
    turns = threading.Semaphore(turns_at_once(device))
    shared = Shared(Hub(), LoopThread(slowness=len(islands)))
    with process_group(islands[0], device) as team, ExitStack() as stack:
        for island in islands:
            folder = Path(island.run_dir) / run.name / island.island
            parts = stack.enter_context(assembled(with_hash(run, island), island, team, device, folder, shared))
            take_turns(parts.trainer, turns)
            running.append(parts)
        live_together(islands, running, live)
    shared.loop.close()


def turns_at_once(device: str) -> int:
    """How many islands may compute at the same time. On a GPU they would only get in each other's way."""
    if device != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def take_turns(trainer: Trainer, turns: threading.Semaphore) -> None:
    """From now on the trainer computes when it has one of the turns; the seconds of a step include the wait for it."""
    step, evaluate = trainer.step, trainer.evaluate

    def step_in_turn(micro_batches: Sequence[Tensor]) -> StepResult:
        asked_at = time.perf_counter()
        with turns:
            result = step(micro_batches)
        return replace(result, seconds=time.perf_counter() - asked_at)

    def evaluate_in_turn(windows: Iterable[Tensor]) -> tuple[float, int]:
        with turns:
            return evaluate(windows)

    trainer.step, trainer.evaluate = step_in_turn, evaluate_in_turn


def live_together(islands: Sequence[IslandConfig], running: Sequence[Parts], live: Callable[[Parts], None]) -> None:
    """Let each island live in a thread of its own; returns when all have, raises when one fails: others need it."""
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def one_life(parts: Parts) -> None:
        try:
            live(parts)
            ended.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again on the main thread
            log.error("this island has failed: %s", error)
            ended.put(error)

    for island, parts in zip(islands, running, strict=True):
        # Daemons: when one island has failed the others wait for it, and are not waited for.
        threading.Thread(target=one_life, args=(parts,), name=island.island, daemon=True).start()
    for _ in running:
        if error := ended.get():
            raise error


def say_goodbye(running: Sequence[Parts]) -> None:
    """Record the end of each island, and close what leaves traces. All end at once, so none needs to be told."""
    for parts in running:
        parts.event("left", "stopped by a signal")
    for parts in running:
        if parts.metrics is not None:
            parts.metrics.close()


def start_logging() -> None:
    """Facts to stderr; the launcher puts them into a file. A thread has its island's name."""
    form = "%(asctime)s %(threadName)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr, force=True)
