"""The program of one rank: `train` for an island of a run, `baseline` for data-parallel training to
compare with.
"""

import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

from diloco import island
from diloco.assemble import Runtime, build_trainer, of_all_islands, open_runtime
from diloco.config.check import check_entry, check_index, check_network, check_trainer
from diloco.config.init_weights import add_weights_hash
from diloco.config.own_code import add_code_hashes, provide_own_code
from diloco.config.schema import Config, IslandConfig, RunConfig
from diloco.connections import close_network
from diloco.doctor.host_memory_check import require_host_memory
from diloco.errors import FolderInUse
from diloco.participation import open_metrics
from diloco.records.kept_config import keep_config, replace_config
from diloco.records.logbook import Logbook
from diloco.records.metrics import Metrics
from diloco.runtime.corpus import load_corpus
from diloco.runtime.evaluation import evaluate_heldout
from diloco.runtime.garbage import collect_garbage, schedule_garbage
from diloco.runtime.mfu import build_mfu_meter, note_peak
from diloco.runtime.operator_requests import SIGNALS, make_request
from diloco.runtime.process_group import fit_to_device, open_process_group, pick_device
from diloco.runtime.rank_ends import FAILED, RankEnd, build_rank_end
from diloco.runtime.step_records import make_step_record
from diloco.tuning.choice import choose_settings
from diloco.watchdog.rank_notes import LastLines, is_end_noted, note_error
from diloco.watchdog.signals import end_with_parent, on_stop
from diloco.watchdog.watchdog import Watchdog, WatchedRank
from inner.data.batches import IslandBatches
from inner.data.corpus import Corpus
from inner.trainer import Trainer
from outer.errors import name_lost_rank

log = logging.getLogger(__name__)


def train(config: Config, index: int, loop: Callable[[Runtime], None] = island.run) -> None:
    """Run this rank of island `index` until the run is over."""
    run = config.run
    settings = config.for_island(index)
    start_logging(settings.label)
    end_with_parent()
    goodbyes: list[Runtime] = []
    folder = settings.folder(run.name)
    requests = {
        int(number): partial(make_request, folder, name) for number, name in SIGNALS.items()
    }
    end = build_rank_end(folder)
    on_stop(partial(stop, goodbyes, end), requests)
    check_trainer(run)
    provide_own_code(run)
    check_network(run, settings)
    check_index(config, index)
    check_entry(run, settings)
    device = pick_device(settings)
    settings = fit_to_device(settings, device)
    require_host_memory(run, settings, device)
    with open_process_group(settings, device) as ranks:
        if ranks.is_leader:
            keep_config(folder.parent, config)
        run = ranks.on_leader(lambda: add_code_hashes(add_weights_hash(run, settings)))
        book = Logbook(folder.parent, settings.label)
        with (
            log_failure(book, ranks.rank, end),
            open_runtime(run, settings, ranks, device, folder) as runtime,
            recorded_ends(runtime, end),
        ):
            goodbyes.append(runtime)
            if ranks.is_leader:
                runtime.participation.on_entry = partial(replace_config, folder.parent, config)
            if runtime.network.wait_for_loss is not None:
                runtime.participation.event_loop.start(
                    end_at_loss(runtime, runtime.network.wait_for_loss)
                )
            schedule_garbage()
            post = WatchedRank(
                ranks.rank, ranks.num_ranks, folder, partial(report_hang, goodbyes, end)
            )
            with Watchdog(runtime.activity, post):
                loop(runtime)


def baseline(config: Config, num_islands: int, num_ranks: int) -> None:
    """Train data-parallel: every step takes the tokens of all islands and averages their
    gradients.
    """
    run = config.run
    settings = config.for_island(0).model_copy(update={"ranks": num_ranks, "name": "baseline"})
    start_logging("baseline")
    end_with_parent()
    on_stop(lambda: None)
    device = pick_device(settings)
    settings = fit_to_device(settings, device)
    with open_process_group(settings, device) as ranks:
        corpus = load_corpus(run, settings)
        folder = settings.folder(run.name)
        settings = choose_settings(
            of_all_islands(run, num_islands), settings, device, ranks, folder
        )
        trainer = build_trainer(run, settings, corpus, device, num_islands=num_islands)
        metrics = open_metrics(run, settings, folder) if ranks.is_leader else None
        schedule_garbage()
        train_data_parallel(run, settings, corpus, trainer, num_islands, metrics)


def train_data_parallel(
    run: RunConfig,
    settings: IslandConfig,
    corpus: Corpus,
    trainer: Trainer,
    num_islands: int,
    metrics: Metrics | None,
) -> None:
    """Train on this rank, together with all others.

    Evaluate after each step at which the islands would have committed a round.
    """
    num_sequences = run.optimizer.tokens_per_step * num_islands // run.data.seq_len
    batches = IslandBatches(corpus, run.data.seq_len, run.reading_seed, 1, num_sequences)
    speed = (
        build_mfu_meter(run, settings, corpus, trainer.settings.device)
        if metrics is not None
        else None
    )
    note_peak(Logbook(settings.runs / run.name, "baseline"), speed)
    tokens = 0
    for step in range(run.total_steps):
        batches.expect([range(step, run.total_steps)])
        batch = batches.read_step(
            step, trainer.data_rank, trainer.num_data_ranks, trainer.settings.micro_batch
        )
        result = trainer.step(batch.micro_batches)
        tokens += result.tokens
        if metrics is not None and speed is not None:
            metrics.write(make_step_record(result, tokens, speed, batch))
        collect_garbage(result.step)
        rounds, rest = divmod(result.step, run.outer.inner_steps)
        if rest == 0 and rounds % run.evaluate.every_rounds == 0:
            record = evaluate_heldout(run, trainer, corpus, rounds, tokens)
            if metrics is not None:
                metrics.write(record)


def start_logging(island: str) -> None:
    """Log to stderr, which the launcher writes to the island's log.txt."""
    rank = os.environ.get("RANK", "0")
    form = f"%(asctime)s {island}/{rank} %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr, force=True)
    logging.getLogger().addHandler(LastLines(int(rank)))


@contextmanager
def recorded_ends(runtime: Runtime, end: RankEnd | None) -> Iterator[None]:
    """Record at the start how ranks of the last life were lost, and note at the end that none was.

    Only the leader does anything.
    """
    if end is None or runtime.metrics is None:
        yield
        return
    if cause := end.begin_life():
        runtime.event("died", cause)
    yield
    end.end_life()


@contextmanager
def log_failure(book: Logbook, rank: int, end: RankEnd | None = None) -> Iterator[None]:
    """Write the error that ends this rank into the logbook, and into its note.

    Raises RankLost if the cause is the end of another rank.
    """
    try:
        yield
    except FolderInUse:
        # The folder and its logbook belong to another process, which is running.
        raise
    except Exception as error:
        named = name_lost_rank(error)
        note_error(rank, f"{type(named).__name__}: {named}")
        if end is not None:
            end.note(f"{FAILED}{type(named).__name__}: {named}")
        book.note("failed", f"rank {rank}: {type(named).__name__}: {named}")
        if named is error:
            raise
        raise named from error


async def end_at_loss(runtime: Runtime, wait_for_loss: Callable[[], Awaitable[str]]) -> None:
    """End this process once its network is lost for good, so that the launcher restarts the island.

    Otherwise an island whose libp2p daemon has died would train alone for ever.
    """
    if cause := await wait_for_loss():
        log.error("%s; this rank ends", cause)
        runtime.event("failed", cause)
        os._exit(1)


def report_hang(running: list[Runtime], end: RankEnd | None, verdict: str) -> None:
    """Record the verdict on a hang. One rank does so.

    The others leave no note, and are not taken for killed.
    """
    if end is not None:
        end.end_life()
    say_goodbye(running, "hung", verdict)


def stop(running: list[Runtime], end: RankEnd | None) -> None:
    """Leave the run after a signal."""
    if end is not None:
        end.note("left: stopped by a signal")
    say_goodbye(running, "left", "stopped by a signal")


def say_goodbye(running: list[Runtime], name: str, text: str) -> None:
    """Record the reason, withdraw from the run, and close network and records.

    By the withdrawal, others learn of the end at once.
    """
    for runtime in running:
        # If the launcher ends this rank because another one has died, it records that end itself.
        if name != "left" or not is_end_noted():
            runtime.event(name, text)
        steps = runtime.trainer.inner_step - runtime.outer.schedule.begin(runtime.outer.round)
        runtime.outer.leave(max(steps, 0))
        # The event loop stays open: its end would make the waiting training thread end the process
        # too early.
        close_network(runtime.network, runtime.participation.event_loop)
        if runtime.metrics is not None:
            runtime.metrics.close()
