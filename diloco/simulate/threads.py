"""Run all islands as threads of this process over a hub: the child of `diloco simulate
--in-process`.

Each island has the same as in a separate process: a model and optimizers on a mesh of one rank, a
training thread, a thread for the round in the background, and records. The islands share the pages
of the corpus, torch's world of one rank, the hub, one event loop, and the processors: at most one
island per processor computes at a time. Global params that all islands hold are evaluated once.

The results do not depend on the order in which islands compute. Weights and data come from seeds
with separate generators, nothing draws from torch's global generator, a reduce adds in the order of
the plan, and every plan contains all islands. An island may wait long for its turn to compute. So
the event loop's clock is slowed down by the number of islands: no deadline passes early, and
islands send each other as many calls per second as real islands. Each island saves its own
checkpoints. After a kill all islands resume from the same step.

Compiled islands compute one at a time. While torch traces a graph in one thread, it takes a
compiled block that another thread runs for a part of the trace, and refuses it.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from queue import SimpleQueue

from diloco import island
from diloco.assemble import Runtime, open_runtime
from diloco.config.init_weights import add_weights_hash
from diloco.config.own_code import provide_own_code
from diloco.config.schema import Config, IslandConfig
from diloco.connections import Shared
from diloco.runtime.evaluation import SharedEvaluations
from diloco.runtime.garbage import schedule_garbage
from diloco.runtime.process_group import fit_to_device, open_process_group, pick_device
from diloco.watchdog.signals import end_with_parent, on_stop
from outer.network.event_loop import EventLoopThread
from outer.transports.loopback import Hub

log = logging.getLogger(__name__)


def train_together(
    config: Config, loop: Callable[[Runtime], None] = island.run, num_processors: int | None = None
) -> None:
    """Run all islands of the config until the run is over. Raises the error of the first island
    that fails.

    At most `num_processors` islands compute at the same time; None: one per processor.
    """
    start_logging()
    end_with_parent()
    run = config.run
    islands = [config.for_island(index) for index in range(len(config.islands))]
    provide_own_code(run)
    running: list[Runtime] = []
    on_stop(lambda: say_goodbye(running))
    device = pick_device(islands[0])
    islands = [fit_to_device(island, device) for island in islands]
    is_compiled = any(island.parallel.compile is True for island in islands)
    turns = threading.Semaphore(1 if is_compiled else num_processors or count_processors(device))
    shared = Shared(Hub(), EventLoopThread(slowness=len(islands)), turns, SharedEvaluations())
    with open_process_group(islands[0], device) as ranks, ExitStack() as stack:
        for settings in islands:
            folder = settings.folder(run.name)
            pinned = add_weights_hash(run, settings)
            running.append(
                stack.enter_context(open_runtime(pinned, settings, ranks, device, folder, shared))
            )
        resume_together(running)
        schedule_garbage()
        run_threads(islands, running, loop)
    shared.event_loop.close()


def resume_together(running: Sequence[Runtime]) -> None:
    """Make all islands resume from checkpoints of the same step: the last step for which every
    island has a checkpoint.

    A kill may have come when some islands had saved a round and others had not. The others would
    have to take the state of an island, without the state of their own optimizers, and the run
    would continue differently than without the kill.
    """
    saved = [each.checkpoints for each in running if each.island.checkpoint.resume == "auto"]
    found = [checkpoints.find_steps() for checkpoints in saved if checkpoints is not None]
    if len(found) < len(running) or not any(found):
        return
    if common := set.intersection(*found):
        for checkpoints in filter(None, saved):
            checkpoints.resume_at(max(common))
    else:
        log.warning(
            "the islands' checkpoints are of different steps: some islands take the state of others"
        )


def count_processors(device: str) -> int:
    """Return the number of islands that may compute at the same time. On a GPU they would only slow
    each other down.
    """
    if device != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_threads(
    islands: Sequence[IslandConfig], running: Sequence[Runtime], loop: Callable[[Runtime], None]
) -> None:
    """Run each island in a thread, and return when all have ended. Raises if one fails, because
    others need it.
    """
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def run_one(runtime: Runtime) -> None:
        try:
            loop(runtime)
            ended.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again on the main thread
            log.error("this island has failed: %s", error)
            ended.put(error)

    for settings, runtime in zip(islands, running, strict=True):
        # Daemon threads: when one island fails, the other islands wait for it, and this process
        # must not wait for them.
        threading.Thread(target=run_one, args=(runtime,), name=settings.label, daemon=True).start()
    for _ in running:
        if error := ended.get():
            raise error


def say_goodbye(running: Sequence[Runtime]) -> None:
    """Record the end of each island and close its records. All end together, so none announces it
    to the others.
    """
    for runtime in running:
        runtime.event("left", "stopped by a signal")
    for runtime in running:
        if runtime.metrics is not None:
            runtime.metrics.close()


def start_logging() -> None:
    """Log to stderr, which the launcher writes to a file. Each thread has the name of its
    island.
    """
    form = "%(asctime)s %(threadName)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr, force=True)
