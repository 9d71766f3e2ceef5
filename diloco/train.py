"""What runs inside a rank: `train` for one island of a run, `baseline` for data-parallel training to compare with."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from diloco import own_pace as life
from diloco.assemble import (
    Parts,
    assembled,
    build_trainer,
    close_network,
    device_of,
    load_corpus,
    open_metrics,
    process_group,
)
from diloco.config import Config, IslandConfig, RunConfig, dump_config
from diloco.initial import with_hash
from diloco.logbook import Logbook
from diloco.measure import evaluation, read_unit, speedometer, step_record
from diloco.metrics import Metrics
from diloco.runfiles import FolderHeld, write_atomically
from diloco.signals import end_with_parent, on_stop
from diloco.watchdog import Post, Watchdog
from diloco.wishes import SIGNALS, ask
from inner.data.batches import IslandBatches
from inner.data.corpus import Corpus
from inner.trainer import Trainer

log = logging.getLogger(__name__)


def train(config: Config, index: int, live: Callable[[Parts], None] = life.run) -> None:
    """This rank's part in the island `index` of a run; returns when the run is over, or `live` returns."""
    run, island = config.run, config.for_island(index)
    start_logging(island.island)
    end_with_parent()
    goodbyes: list[Parts] = []
    folder = Path(island.run_dir) / run.name / island.island
    wishes = {int(number): partial(ask, folder, name) for number, name in SIGNALS.items()}
    on_stop(lambda: say_goodbye(goodbyes, "left", "stopped by a signal"), wishes)
    device = device_of(island)
    with process_group(island, device) as team:
        if team.is_leader:
            keep_config(folder.parent, config)
        run = team.broadcast(with_hash(run, island) if team.is_leader else None)
        book = Logbook(folder.parent, island.island)
        with noted_failure(book, team.rank), assembled(run, island, team, device, folder) as parts:
            goodbyes.append(parts)
            post = Post(team.rank, team.num_ranks, folder, partial(say_goodbye, goodbyes, "hung"))
            with Watchdog(parts.heartbeat, post):
                live(parts)


def baseline(config: Config, num_islands: int, ranks: int) -> None:
    """Synchronous data-parallel training: the islands' tokens in every step, gradients averaged in every step."""
    run = config.run
    island = config.for_island(0).model_copy(update={"ranks": ranks, "name": "baseline"})
    start_logging("baseline")
    end_with_parent()
    on_stop(lambda: None)
    device = device_of(island)
    with process_group(island, device) as team:
        corpus = load_corpus(run, island)
        trainer = build_trainer(run, island, corpus, device, num_islands=num_islands)
        metrics = open_metrics(run, island, Path(island.run_dir) / run.name / "baseline") if team.is_leader else None
        train_data_parallel(run, island, corpus, trainer, num_islands, metrics)


def train_data_parallel(
    run: RunConfig, island: IslandConfig, corpus: Corpus, trainer: Trainer, num_islands: int, metrics: Metrics | None
) -> None:
    """Every rank calls it; evaluates where the islands would have committed a round."""
    num_sequences = run.optimizer.tokens_per_step * num_islands // run.data.seq_len
    batches = IslandBatches(corpus, run.data.seq_len, run.seed, 1, num_sequences)
    speed = speedometer(run, island, corpus, trainer.settings.device) if metrics is not None else None
    tokens = 0
    for step in range(run.total_steps):
        reading = read_unit(batches, step, trainer)
        result = trainer.step(reading.micro_batches)
        tokens += result.tokens
        if metrics is not None and speed is not None:
            metrics.step(step_record(result, tokens, speed, reading))
        rounds, rest = divmod(result.step, run.outer.inner_steps)
        if rest == 0 and rounds % run.evaluate.every_rounds == 0:
            record = evaluation(run, trainer, corpus, rounds, tokens)
            if metrics is not None:
                metrics.evaluation(record)


def start_logging(island: str) -> None:
    """Facts to stderr; the launcher puts them into the island's log.txt."""
    rank = os.environ.get("RANK", "0")
    form = f"%(asctime)s {island}/{rank} %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr, force=True)


def keep_config(folder: Path, config: Config) -> None:
    """Write the resolved config into the run's folder, unless the launcher has."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.yaml").exists():
        write_atomically(folder / "config.yaml", dump_config(config))


@contextmanager
def noted_failure(book: Logbook, rank: int) -> Iterator[None]:
    """Put what ends this rank into the logbook, too."""
    try:
        yield
    except FolderHeld:
        # Not of this island's life: the logbook is told by the one that runs.
        raise
    except Exception as error:
        book.note("failed", f"rank {rank}: {type(error).__name__}: {error}")
        raise


def say_goodbye(running: list[Parts], name: str, text: str) -> None:
    """Record why, and withdraw from the run, so that others need not find out; close what leaves traces."""
    for parts in running:
        parts.event(name, text)
        steps = parts.trainer.inner_step - parts.outer.schedule.begin(parts.outer.round)
        parts.outer.leave(max(steps, 0))
        # Not the loop: the training thread waits in it, and would end the process before its time.
        close_network(parts.network, parts.loop)
        if parts.metrics is not None:
            parts.metrics.close()
