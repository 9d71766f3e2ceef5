"""Builds what one rank of an island works with, in the order of dependencies."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from diloco.checkpoints.island_checkpoint import IslandCheckpoints, open_checkpoints
from diloco.config.schema import IslandConfig, RunConfig, at_stage, longest_sequence
from diloco.connections import Shared
from diloco.faults.self_inflicted import slow_down
from diloco.participation import Participation, open_participation
from diloco.records.metrics import Metrics
from diloco.runtime.buffer_watch import BufferWatch
from diloco.runtime.corpus import loading_corpus
from diloco.runtime.evaluation import SharedEvaluations
from diloco.runtime.inner_traffic import InnerTraffic
from diloco.runtime.mfu import MfuMeter, build_mfu_meter, note_peak
from diloco.status.visitors import Equipment
from diloco.tuning.choice import choose_settings
from diloco.watchdog.activity import ActivityMonitor
from diloco.watchdog.rank_times import RankTimes
from inner.data.batches import IslandBatches, heldout_counts
from inner.data.corpus import Corpus
from inner.data.stages import StageReading, StageStart, find_stage_start
from inner.huggingface.model_types import find_export_obstacles
from inner.measure.profile import Profiler
from inner.mesh import IslandMesh, resolve_degrees
from inner.model.buffers import all_buffers, saved_buffers, with_buffers
from inner.model.sizes import ModelSizes, OwnModel, resolve_model
from inner.model.transformer import Transformer
from inner.optim.moments import ParamsAndMoments
from inner.optim.own_optimizer import check_own_optimizer
from inner.parallel.own_model import check_own_model
from inner.trainer import Trainer, TrainerSettings
from outer.connect.settings import Network
from outer.leases.ledger import Ledger
from outer.loop import OuterLoop
from outer.space.ranks import RankGroup

log = logging.getLogger(__name__)


@dataclass
class Runtime:
    """Everything that one rank of an island works with. Only the leader has metrics and a speed
    meter.
    """

    config: RunConfig
    island: IslandConfig
    corpus: Corpus
    batches: IslandBatches
    trainer: Trainer
    participation: Participation
    profiler: Profiler
    speed: MfuMeter | None
    checkpoints: IslandCheckpoints | None
    slow_down: Callable[[float], None]
    """Called with the seconds of each inner step; a fault may make it sleep."""
    activity: ActivityMonitor
    stage: int
    """The stage of the run that trainer and batches are set for; -1 before the first round."""
    turns: AbstractContextManager
    """Held while the model computes, to limit how many islands of one process compute at once."""
    traffic: InnerTraffic
    """What this rank sends inside its island."""
    evaluations: SharedEvaluations | None
    """Evaluations that the islands of this process share; None in a process with one island."""
    buffer_watch: BufferWatch
    """Tells of buffers of an own model that change and that no module names in `saved_buffers`."""
    tokens: int = 0
    """Number of tokens that this island has trained on."""
    times: RankTimes = field(default_factory=RankTimes)
    """Where this rank's training thread spends its time."""

    @property
    def outer(self) -> OuterLoop:
        return self.participation.outer

    @property
    def network(self) -> Network:
        return self.participation.network

    @property
    def metrics(self) -> Metrics | None:
        return self.participation.metrics

    def event(self, name: str, text: str) -> None:
        """Record and log an event of the island. Only the leader does anything."""
        self.participation.event(name, text)

    @property
    def stage_config(self) -> RunConfig:
        """The run's config with the settings of the current stage."""
        return at_stage(self.config, max(self.stage, 0))

    def enter_stage(self, ledger: Ledger) -> None:
        """Train on the text and with the settings of this ledger's stage from the next inner step
        on.
        """
        borders = ledger.borders
        number = len(borders)
        if number == self.stage or not self.config.stages:
            return
        config = at_stage(self.config, number)
        self.stage = number
        self.batches = build_batches(self.config, self.corpus, borders)
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
    return (
        f"steps of {config.optimizer.tokens_per_step} tokens, sequences of "
        f"{config.data.seq_len}{shares}"
    )


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
        first_seq_len=at_stage(config, 0).data.seq_len,
        seed=config.seed,
        total_steps=config.total_steps,
        eos_id=corpus.eos_id if config.data.document_mask else None,
        init_from=config.initial_weights(island),
    )
    check_own_optimizer(optimizer, degrees)
    model = resolve_model(config.model, corpus.vocab_size)
    if isinstance(model, OwnModel):
        masks_documents = config.data.document_mask
        check_own_model(
            model, degrees, island.parallel, settings.seq_len, masks_documents=masks_documents
        )
    mesh = IslandMesh(degrees, torch.device(device).type)
    if isinstance(model, ModelSizes) and mesh.world.get_rank() == 0:
        for obstacle in find_export_obstacles(model, optimizer.balance.bias_speed):
            log.warning("the trained model will have no export: %s", obstacle)
    parallel = island.parallel.on_device(torch.device(device).type, degrees.pp)
    return Trainer(model, optimizer, mesh, parallel, settings)


def of_all_islands(config: RunConfig, num_islands: int) -> RunConfig:
    """Return the config of data-parallel training, whose steps take the tokens of all islands."""
    tokens = config.optimizer.tokens_per_step * num_islands
    return config.model_copy(
        update={"optimizer": config.optimizer.model_copy(update={"tokens_per_step": tokens})}
    )


@contextmanager
def open_runtime(
    config: RunConfig,
    island: IslandConfig,
    ranks: RankGroup,
    device: str,
    folder: Path,
    shared: Shared | None = None,
) -> Iterator[Runtime]:
    """Build the runtime of one rank and open its network connections. Every rank of the island must
    enter it.

    `shared` is given if other islands run in this process.
    """
    with ExitStack() as stack:
        island = choose_settings(config, island, device, ranks, folder)
        vocabulary, wait_for_corpus = stack.enter_context(loading_corpus(config, island))
        trainer = build_trainer(config, island, vocabulary, device)
        speed = build_mfu_meter(config, island, vocabulary, device) if ranks.is_leader else None
        activity = ActivityMonitor(island.watchdog_seconds)
        moments = (
            None
            if config.outer.moments is None
            else ParamsAndMoments(trainer.params, trainer.optimizers)
        )
        opening = open_participation(
            config,
            island,
            ranks,
            folder,
            with_buffers(
                moments or trainer.params,
                trainer.buffer_specs,
                list(saved_buffers(trainer.model_parts)),
            ),
            Equipment(str(resolve_degrees(island.mesh, island.ranks)), device, activity),
            moments=moments,
            wait_for_corpus=wait_for_corpus,
            beat=activity.beat,
            loss_scale=lambda: None if trainer.loss_scale is None else trainer.loss_scale.exponent,
            shared=shared,
        )
        participation = stack.enter_context(opening)
        note_peak(participation.book, speed)
        corpus = wait_for_corpus()
        yield Runtime(
            config=config,
            island=island,
            corpus=corpus,
            batches=build_batches(config, corpus),
            trainer=trainer,
            participation=participation,
            speed=speed,
            checkpoints=stack.enter_context(
                open_checkpoints(config, island, folder, trainer, participation.outer)
            ),
            profiler=stack.enter_context(Profiler(island.profile, folder / "profile", ranks.rank)),
            slow_down=partial(slow_down, participation.hooks),
            activity=activity,
            times=RankTimes(stopped=lambda: activity.stopped_seconds),
            traffic=InnerTraffic(config, island, device, trainer.mesh, is_leader=ranks.is_leader),
            stage=-1,
            turns=nullcontext() if shared is None else shared.turns,
            evaluations=None if shared is None else shared.evaluations,
            buffer_watch=watch_buffers(trainer),
        )


def watch_buffers(trainer: Trainer) -> BufferWatch:
    """Return the watch over the buffers of an own model that none of its modules names. Our own
    decoder has no other buffers that change.
    """
    own = [part for part in trainer.model_parts if not isinstance(part, Transformer)]
    named = {buffer.name for buffer in saved_buffers(own)}
    others = [buffer for part in own for buffer in all_buffers(part) if buffer.name not in named]
    return BufferWatch(others, "name them in `saved_buffers` of their modules (docs/extending.md)")


def build_batches(
    config: RunConfig, corpus: Corpus, borders: Sequence[tuple[int, int]] = ()
) -> IslandBatches:
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
        texts = [
            replace(text, weight=weight) for text, weight in zip(corpus.texts, weights, strict=True)
        ]
        corpus = replace(corpus, texts=tuple(texts))
        config = at_stage(config, len(borders))
    seq_len = config.data.seq_len
    num_sequences = config.optimizer.tokens_per_step // seq_len
    return IslandBatches(
        corpus, seq_len, config.reading_seed, config.outer.start_islands, num_sequences, start
    )


def read_stage(config: RunConfig) -> StageReading:
    """Return how a stage with this config reads the text."""
    weights = [entry.weight for entry in config.data.mixture] or [1.0]
    seq_len = config.data.seq_len
    return StageReading(weights, seq_len, config.optimizer.tokens_per_step // seq_len)
