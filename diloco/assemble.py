"""Builds what one rank of an island works with, in the order in which the pieces need one another."""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch

from diloco.checkpoints.island_checkpoint import IslandCheckpoints, open_checkpoints
from diloco.config.from_swarm import parse_swarm_config, swarm_text
from diloco.config.schema import IslandConfig, RunConfig, differing_keys
from diloco.errors import ConfigError
from diloco.faults.self_inflicted import build_hooks, slow_down
from diloco.records.logbook import Logbook
from diloco.records.metrics import EventRecord, Metrics
from diloco.records.run_folder import hold_folder
from diloco.records.sinks import build_sinks
from diloco.runtime.corpus import load_corpus
from diloco.runtime.operator_requests import OperatorRequests
from diloco.runtime.round_records import RoundRecords
from diloco.runtime.step_records import MfuMeter, build_mfu_meter
from diloco.watch.activity import ActivityMonitor
from inner.data.batches import IslandBatches
from inner.data.corpus import Corpus
from inner.measure.profile import Profiler
from inner.mesh import IslandMesh, resolve_degrees
from inner.model.sizes import resolve_sizes
from inner.optim.moments import ParamsAndMoments
from inner.trainer import Trainer, TrainerSettings
from outer.agreement.peers import Identity
from outer.connect import Network, NetworkSettings, open_network
from outer.diagnostics import DiagnosticsServer, ProbeResponder
from outer.hooks import Hooks
from outer.identity.access import BANNED_FILE
from outer.identity.island_key import KEY_FILE, IslandKey, load_island_key
from outer.identity.known_names import NAMES_FILE
from outer.loop import OuterLoop, build_loop
from outer.network.event_loop import EventLoopThread
from outer.network.run_key import load_run_key
from outer.report import LoopSettings
from outer.space.ranks import RankGroup
from outer.transports.loopback import Hub

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class Shared:
    """What the islands of one process share."""

    hub: Hub
    event_loop: EventLoopThread
    turns: threading.Semaphore
    """Limits how many islands compute at the same time."""


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
    event_loop: EventLoopThread
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
    turns: AbstractContextManager
    """Held while the model computes; it limits how many islands of one process do so at once."""
    tokens: int = 0
    """Number of tokens that this island has trained on."""

    def event(self, name: str, text: str) -> None:
        """Record and log an event of the island. Only the leader does anything."""
        if self.metrics is not None:
            log.info("%s: %s", name, text)
            self.metrics.write(EventRecord(name=name, text=text))
            self.book.note(name, text)


def build_trainer(
    config: RunConfig, island: IslandConfig, corpus: Corpus, device: str, *, num_islands: int = 1
) -> Trainer:
    """The inner trainer. With `num_islands` it trains data-parallel on the tokens of so many islands in each step."""
    optimizer = config.optimizer
    if num_islands > 1:
        optimizer = optimizer.model_copy(update={"tokens_per_step": optimizer.tokens_per_step * num_islands})
    degrees = resolve_degrees(island.mesh, island.ranks)
    settings = TrainerSettings(
        device=device,
        compute_dtype=island.compute_dtype,
        micro_batch=island.micro_batch,
        seq_len=config.data.seq_len,
        seed=config.seed,
        total_steps=config.total_steps,
        eos_id=corpus.eos_id if config.data.document_mask else None,
        init_from=config.initial_weights(island),
    )
    sizes = resolve_sizes(config.model, corpus.vocab_size)
    mesh = IslandMesh(degrees, torch.device(device).type)
    return Trainer(sizes, optimizer, mesh, island.parallel, settings)


@contextmanager
def open_runtime(
    config: RunConfig, island: IslandConfig, ranks: RankGroup, device: str, folder: Path, shared: Shared | None = None
) -> Iterator[Runtime]:
    """Build the runtime of one rank and open its network connections. Every rank of the island must enter it.

    `shared` is given if other islands run in this process.
    """
    with ExitStack() as stack:
        started_at = time.time()
        corpus = load_corpus(config, island)
        num_sequences = config.optimizer.tokens_per_step // config.data.seq_len
        num_islands = config.outer.start_islands
        batches = IslandBatches(corpus, config.data.seq_len, config.seed, num_islands, num_sequences)
        trainer = build_trainer(config, island, corpus, device)
        metrics = stack.enter_context(open_records(config, island, folder)) if ranks.is_leader else None
        requests = OperatorRequests(ranks, folder, island.max_hours, started_at)
        # A lone island needs no network.
        hub, event_loop = (Hub(), EventLoopThread()) if shared is None else (shared.hub, shared.event_loop)
        if shared is None:
            stack.callback(event_loop.close)
        # The island's ranks trust each other, and all of them speak in its name.
        key = IslandKey(ranks.on_leader(lambda: load_island_key(folder / KEY_FILE).secret))
        network = connect(config, island, ranks, event_loop, folder, hub, key)
        stack.callback(close_network, network, event_loop)
        stack.callback(requests.close)
        identity = build_identity(config, island, ranks, key)
        hooks = build_hooks(island.faults, island.index, ranks.rank, folder)
        rounds = RoundRecords(metrics, config.outer.start_islands)
        settings = build_loop_settings(config, island, folder, hooks, rounds)
        moments = None if config.outer.moments is None else ParamsAndMoments(trainer.params, trainer.optimizers)
        outer = build_loop(config.outer, identity, moments or trainer.params, ranks, network, event_loop, settings)
        rounds.find_ledger = lambda: outer.position.ledger
        DiagnosticsServer(network.messenger, ProbeResponder(config.hash, lambda: outer.position.round))
        # Islands of one process are threads, and a checkpoint's ranks talk over torch's groups of the whole process.
        saving = open_checkpoints(config, island, folder, trainer, outer) if shared is None else nullcontext()
        yield Runtime(
            config=config,
            island=island,
            corpus=corpus,
            batches=batches,
            trainer=trainer,
            outer=outer,
            network=network,
            event_loop=event_loop,
            metrics=metrics,
            speed=build_mfu_meter(config, island, corpus, device) if ranks.is_leader else None,
            checkpoints=stack.enter_context(saving),
            profiler=stack.enter_context(Profiler(island.profile, folder / "profile", ranks.rank)),
            slow_down=partial(slow_down, hooks),
            activity=ActivityMonitor(island.watchdog_seconds),
            requests=requests,
            rounds=rounds,
            book=Logbook(folder.parent, island.label),
            moments=moments,
            turns=nullcontext() if shared is None else shared.turns,
        )


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


def build_identity(config: RunConfig, island: IslandConfig, ranks: RankGroup, key: IslandKey) -> Identity:
    """Who this island is in the run, as a new incarnation. Every rank of the island calls it together."""
    return Identity(
        island=island.label,
        incarnation=ranks.broadcast(secrets.token_hex(8)),
        identity=key.public,
        config_hash=config.hash,
    )


def build_loop_settings(
    config: RunConfig, island: IslandConfig, folder: Path, hooks: Hooks, rounds: RoundRecords
) -> LoopSettings:
    """How the outer loop runs on this island."""
    # Progress of a round, and of one put on top of a taken state; with observers also of a fragment whose plan was
    # fixed before it was contributed.
    num_rounds = 2 if config.outer.wait_for == "all" else 4
    return LoopSettings(
        max_tokens=num_rounds * config.outer.inner_steps * config.optimizer.tokens_per_step,
        joins=island.joins,
        index=island.index,
        seed=config.seed,
        cache_dir=folder / "incoming",
        hooks=hooks,
        on_wait=rounds.on_wait,
        on_abort=rounds.on_abort,
    )


def close_network(network: Network, event_loop: EventLoopThread) -> None:
    """Free the sockets and processes of a rank."""
    try:
        event_loop.run(network.close(), timeout_seconds=CLOSE_SECONDS)
    except TimeoutError:
        log.warning("the network did not close within %.0f s", CLOSE_SECONDS)


def connect(
    config: RunConfig,
    island: IslandConfig,
    ranks: RankGroup,
    event_loop: EventLoopThread,
    folder: Path,
    hub: Hub,
    key: IslandKey,
) -> Network:
    """Open the rank's connections to other islands. The leader checks that they run the same config."""
    # Settings of the same name are the island's own.
    names = {field.name for field in fields(NetworkSettings)} & IslandConfig.model_fields.keys()
    leader_address = None
    network = None
    for turn in ("leader", "others"):
        if ranks.is_leader == (turn == "leader"):
            settings = NetworkSettings(
                run_id=config.name,
                island=island.label,
                rank=ranks.rank,
                run_key=load_run_key(island.run_key_file),
                island_key=key,
                names_path=folder / NAMES_FILE if ranks.is_leader else None,
                ban_files=[folder / BANNED_FILE, folder.parent / BANNED_FILE],
                identity_path=folder / "identity.key",
                hub=hub,
                leader_address=leader_address,
                **{name: getattr(island, name) for name in names},
            )
            network = event_loop.run(open_network(config.outer.transport, settings))
        leader_address = ranks.broadcast(network.leader_address if ranks.is_leader and network else None)
    assert network is not None
    if network.membership is not None:
        theirs = event_loop.run(network.membership.read_config())
        check_same_run(config, theirs)
        event_loop.run(network.membership.publish_config(swarm_text(config)))
    return network


def check_same_run(ours: RunConfig, theirs: str | None) -> None:
    """Raise ConfigError, naming the keys, if the swarm's config of this run differs from ours. None: it has none."""
    if theirs is None:
        return
    run = parse_swarm_config(theirs)
    if run.hash != ours.hash:
        differences = "\n".join(f"  {line}" for line in differing_keys(ours, run))
        raise ConfigError(
            f"the swarm's run {ours.name!r} has another config than this island:\n{differences}\n"
            "use the run's own (`diloco join ADDRESS` fetches it), or give this run another name"
        )


def open_metrics(config: RunConfig, island: IslandConfig, folder: Path) -> Metrics:
    """Open the island's metrics.jsonl and the other sinks that its config names."""
    sinks = build_sinks(island, folder, run_name=f"{config.name}/{island.label}", settings=config.model_dump())
    return Metrics(folder / "metrics.jsonl", sinks)
