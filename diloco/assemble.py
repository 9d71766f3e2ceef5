"""Builds what one rank of an island works with, in the order of dependencies."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from diloco.checkpoints.island_checkpoint import IslandCheckpoints, open_checkpoints
from diloco.config.schema import IslandConfig, RunConfig, at_stage, longest_sequence, most_tokens_per_step, stage_rounds
from diloco.connections import Shared, open_connections
from diloco.faults.self_inflicted import build_hooks, slow_down
from diloco.records.logbook import Logbook
from diloco.records.metrics import EventRecord, Metrics
from diloco.records.run_folder import hold_folder
from diloco.records.sinks import build_sinks
from diloco.runtime.corpus import loading_corpus
from diloco.runtime.operator_requests import OperatorRequests
from diloco.runtime.round_records import RoundRecords
from diloco.runtime.step_records import MfuMeter, SharedEvaluations, build_mfu_meter, note_peak
from diloco.runtime.text_print import text_print
from diloco.status.visitors import serve_visitors
from diloco.tuning.choice import choose_settings
from diloco.watchdog.activity import ActivityMonitor
from diloco.watchdog.rank_times import RankTimes
from inner.data.batches import IslandBatches, heldout_counts
from inner.data.corpus import Corpus
from inner.data.stages import StageReading, StageStart, find_stage_start
from inner.measure.profile import Profiler
from inner.mesh import IslandMesh, resolve_degrees
from inner.model.sizes import OwnModel, resolve_model
from inner.optim.moments import ParamsAndMoments
from inner.optim.own_optimizer import check_own_optimizer
from inner.parallel.own_model import check_own_model
from inner.trainer import Trainer, TrainerSettings
from outer.agreement.running.peers import Identity
from outer.connect.settings import Network
from outer.hooks import Hooks
from outer.identity.island_key import IslandKey
from outer.loop import OuterLoop, build_loop
from outer.network.event_loop import EventLoop
from outer.report import LoopSettings
from outer.space.ranks import RankGroup

log = logging.getLogger(__name__)


@dataclass
class Runtime:
    """Everything that one rank of an island works with. Only the leader has metrics and a speed meter."""

    config: RunConfig
    island: IslandConfig
    corpus: Corpus
    batches: IslandBatches
    trainer: Trainer
    outer: OuterLoop
    network: Network
    event_loop: EventLoop
    profiler: Profiler
    metrics: Metrics | None
    speed: MfuMeter | None
    checkpoints: IslandCheckpoints | None
    slow_down: Callable[[float], None]
    """Called with the seconds of each inner step; a fault may make it sleep."""
    activity: ActivityMonitor
    requests: OperatorRequests
    rounds: RoundRecords
    book: Logbook
    moments: ParamsAndMoments | None
    """Parameters with their moments, if the run averages moments."""
    stage: int
    """The stage of the run that trainer and batches are set for; -1 before the first round."""
    turns: AbstractContextManager
    """Held while the model computes, to limit how many islands of one process compute at once."""
    evaluations: SharedEvaluations | None
    """Evaluations that the islands of this process share; None in a process with one island."""
    tokens: int = 0
    """Number of tokens that this island has trained on."""
    times: RankTimes = field(default_factory=RankTimes)
    """Where this rank's training thread spends its time."""
    on_entry: Callable[[], None] = lambda: None
    """Called once the other islands and the island's own checkpoint have accepted its config."""

    def event(self, name: str, text: str) -> None:
        """Record and log an event of the island. Only the leader does anything."""
        if self.metrics is not None:
            log.info("%s: %s", name, text)
            self.metrics.write(EventRecord(name=name, text=text))
            self.book.note(name, text)

    @property
    def stage_config(self) -> RunConfig:
        """The run's config with the settings of the current stage."""
        return at_stage(self.config, max(self.stage, 0))

    def enter_stage(self, number: int) -> None:
        """Train on the text and with the settings of this stage from the next inner step on."""
        if number == self.stage or not self.config.stages:
            return
        config, borders = at_stage(self.config, number), self.outer.position.ledger.borders
        assert len(borders) == number, f"{len(borders)} borders in the ledger before stage {number}"
        self.stage, self.batches = number, build_batches(self.config, self.corpus, borders)
        self.trainer.enter_stage(config.data.seq_len, config.optimizer)
        if self.speed is not None:
            self.speed = self.speed.at_length(config, self.corpus)
        unit = borders[-1].first if borders else 0
        what = f"{describe_reading(config)}; lr {config.optimizer.lr:g}"
        self.event("stage", f"{number + 1} of {len(self.config.stages)} from unit {unit}: {what}")


def describe_reading(config: RunConfig) -> str:
    """Describe the settings of reading that a stage may change."""
    weights = ", ".join(f"{entry.name} {entry.weight:g}" for entry in config.data.mixture)
    shares = f"; weights {weights}" if weights else ""
    return f"steps of {config.optimizer.tokens_per_step} tokens, sequences of {config.data.seq_len}{shares}"


def build_trainer(
    config: RunConfig, island: IslandConfig, corpus: Corpus, device: str, *, num_islands: int = 1
) -> Trainer:
    """Build the inner trainer.

    Each step trains data-parallel on the tokens of `num_islands` islands.
    """
    optimizer = of_all_islands(at_stage(config, 0), num_islands).optimizer
    degrees = resolve_degrees(island.mesh, island.ranks)
    settings = TrainerSettings(
        device=device,
        compute_dtype=island.resolve_compute_dtype(device),
        micro_batch=island.micro_batch,
        seq_len=longest_sequence(config),
        seed=config.seed,
        total_steps=config.total_steps,
        eos_id=corpus.eos_id if config.data.document_mask else None,
        init_from=config.initial_weights(island),
    )
    check_own_optimizer(optimizer, degrees)
    model = resolve_model(config.model, corpus.vocab_size)
    if isinstance(model, OwnModel):
        masks_documents = config.data.document_mask
        check_own_model(model, degrees, island.parallel, settings.seq_len, masks_documents=masks_documents)
    mesh = IslandMesh(degrees, torch.device(device).type)
    return Trainer(model, optimizer, mesh, island.parallel, settings)


def of_all_islands(config: RunConfig, num_islands: int) -> RunConfig:
    """Return the config of data-parallel training, whose steps take the tokens of all islands."""
    tokens = config.optimizer.tokens_per_step * num_islands
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"tokens_per_step": tokens})})


@contextmanager
def open_runtime(
    config: RunConfig, island: IslandConfig, ranks: RankGroup, device: str, folder: Path, shared: Shared | None = None
) -> Iterator[Runtime]:
    """Build the runtime of one rank and open its network connections. Every rank of the island must enter it.

    `shared` is given if other islands run in this process.
    """
    with ExitStack() as stack:
        started_at = time.time()
        island = choose_settings(config, island, device, ranks, folder)
        vocabulary, wait_for_corpus = stack.enter_context(loading_corpus(config, island))
        trainer = build_trainer(config, island, vocabulary, device)
        metrics = stack.enter_context(open_records(config, island, folder)) if ranks.is_leader else None
        requests = OperatorRequests(ranks, folder, island.max_hours, started_at)
        speed = build_mfu_meter(config, island, vocabulary, device) if ranks.is_leader else None
        note_peak(Logbook(folder.parent, island.label), speed)
        # The others must not wait for an island that still loads text: it connects when it can
        # train.
        corpus = wait_for_corpus()
        network, event_loop = stack.enter_context(open_connections(config, island, ranks, folder, shared))
        stack.callback(requests.close)
        identity = build_identity(config, island, ranks, network.island_key, corpus)
        hooks = build_hooks(island.faults, island.index, ranks.rank, folder)
        activity = ActivityMonitor(island.watchdog_seconds)
        rounds = RoundRecords(metrics, config.outer.start_islands, activity.beat)
        settings = build_loop_settings(config, island, folder, hooks, rounds)
        moments = None if config.outer.moments is None else ParamsAndMoments(trainer.params, trainer.optimizers)
        outer = build_loop(config.outer, identity, moments or trainer.params, ranks, network, event_loop, settings)
        rounds.find_ledger = lambda: outer.position.ledger
        mesh = str(resolve_degrees(island.mesh, island.ranks))
        told = serve_visitors(config, island, network, outer, metrics, mesh=mesh, device=device, doing=activity)
        if told is not None:
            stack.callback(told.linger, event_loop)
        yield Runtime(
            config=config,
            island=island,
            corpus=corpus,
            batches=build_batches(config, corpus),
            trainer=trainer,
            outer=outer,
            network=network,
            event_loop=event_loop,
            metrics=metrics,
            speed=speed,
            checkpoints=stack.enter_context(open_checkpoints(config, island, folder, trainer, outer)),
            profiler=stack.enter_context(Profiler(island.profile, folder / "profile", ranks.rank)),
            slow_down=partial(slow_down, hooks),
            activity=activity,
            requests=requests,
            rounds=rounds,
            book=Logbook(folder.parent, island.label),
            moments=moments,
            stage=-1,
            turns=nullcontext() if shared is None else shared.turns,
            evaluations=None if shared is None else shared.evaluations,
        )


def build_batches(config: RunConfig, corpus: Corpus, borders: Sequence[tuple[int, int]] = ()) -> IslandBatches:
    """Return the corpus in the order in which the run's islands read it after these borders.

    The borders are those of the stages so far. Raises InputError if there is too little of the
    corpus for any of the stages.
    """
    start = StageStart()
    if config.stages:
        heldout_counts(corpus, longest_sequence(config), 1)
        stages = [read_stage(at_stage(config, number)) for number in range(len(config.stages))]
        start = find_stage_start(stages, borders, config.reading_seed)
        weights = stages[len(borders)].weights
        texts = [replace(text, weight=weight) for text, weight in zip(corpus.texts, weights, strict=True)]
        corpus, config = replace(corpus, texts=tuple(texts)), at_stage(config, len(borders))
    seq_len = config.data.seq_len
    num_sequences = config.optimizer.tokens_per_step // seq_len
    return IslandBatches(corpus, seq_len, config.reading_seed, config.outer.start_islands, num_sequences, start)


def read_stage(config: RunConfig) -> StageReading:
    """Return how a stage with this config reads the text."""
    weights = [entry.weight for entry in config.data.mixture] or [1.0]
    seq_len = config.data.seq_len
    return StageReading(weights, seq_len, config.optimizer.tokens_per_step // seq_len)


@contextmanager
def open_records(config: RunConfig, island: IslandConfig, folder: Path) -> Iterator[Metrics]:
    """Lock the island's folder and open its metrics.jsonl and the other sinks that its config names. Leader only."""
    lock = hold_folder(folder)
    try:
        metrics = open_metrics(config, island, folder)
        try:
            Logbook(folder.parent, island.label).note_start(config, island)
            yield metrics
        finally:
            metrics.close()
    finally:
        os.close(lock)


def build_identity(
    config: RunConfig, island: IslandConfig, ranks: RankGroup, key: IslandKey, corpus: Corpus | None
) -> Identity:
    """Return the island's identity in the run, with a new incarnation and a hash of its text.

    Every rank calls it together.
    """
    return Identity(
        island=island.label,
        incarnation=ranks.broadcast(secrets.token_hex(8)),
        identity=key.public,
        config_hash=config.hash,
        text=text_print(corpus) if corpus is not None and ranks.is_leader else None,
    )


def build_loop_settings(
    config: RunConfig, island: IslandConfig, folder: Path, hooks: Hooks, rounds: RoundRecords
) -> LoopSettings:
    """Return the settings of the outer loop on this island."""
    # Room for the progress of a round, and of another round re-based onto a taken state. With
    # observers also for a fragment whose plan was fixed before the island contributed.
    num_rounds = 2 if config.outer.wait_for == "all" else 4
    return LoopSettings(
        max_tokens=num_rounds * config.outer.inner_steps * most_tokens_per_step(config),
        stage_rounds=stage_rounds(config),
        owners=config.data.owners,
        joins=island.joins,
        index=island.index,
        seed=config.seed,
        link_kbit=round(1000 * (island.link_mbit or 0)),
        cache_dir=folder / "incoming",
        hooks=hooks,
        on_wait=rounds.on_wait,
        on_lost=rounds.on_lost,
        on_download=rounds.on_download,
        on_abort=rounds.on_abort,
    )


def open_metrics(config: RunConfig, island: IslandConfig, folder: Path) -> Metrics:
    """Open the island's metrics.jsonl and the other sinks that its config names."""
    sinks = build_sinks(island, folder, run_name=f"{config.name}/{island.label}", settings=config.model_dump())
    return Metrics(folder / "metrics.jsonl", sinks)
