"""Puts an island's parts together, in the order in which they need one another."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from diloco.config import ConfigError, IslandConfig, RunConfig, differing_keys, dump_config, parse_config
from diloco.faults import build_hooks, slow_down
from diloco.heartbeat import Heartbeat
from diloco.logbook import Logbook
from diloco.measure import Speedometer, speedometer
from diloco.metrics import EventRecord, Metrics
from diloco.prepare import data_of
from diloco.run_checkpoints import RunCheckpoints, opened
from diloco.runfiles import hold_folder, write_atomically
from diloco.sinks import build_sinks
from diloco.wishes import Wishes
from inner.data.batches import IslandBatches
from inner.data.corpus import Corpus, prepare_corpus
from inner.measure.profile import Profiler
from inner.mesh import IslandMesh, resolve_degrees
from inner.moments import ParamsAndMoments
from inner.presets import resolve_sizes
from inner.trainer import Trainer, TrainerSettings
from outer.gossip_loop import GossipLoop
from outer.keys import run_key_in
from outer.loop import LoopThread
from outer.network import Network, NetworkSettings, open_network
from outer.phases import Hooks
from outer.presence import Identity
from outer.probe import Greeter, Probe
from outer.reports import Settings
from outer.sync import OuterLoop
from outer.team import Team
from outer.transports.loopback import Hub

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
GROUP_SECONDS = 1800.0
"""Longest wait of ranks for one another beyond the outer loop's own waits."""


@dataclass(frozen=True)
class Shared:
    """What islands of one process have in common."""

    hub: Hub
    loop: LoopThread


@dataclass
class Parts:
    """What one rank of an island works with. Metrics and the speedometer are the leader's alone."""

    config: RunConfig
    island: IslandConfig
    corpus: Corpus
    batches: IslandBatches
    trainer: Trainer
    outer: OuterLoop | GossipLoop
    network: Network
    loop: LoopThread
    profiler: Profiler
    metrics: Metrics | None
    speed: Speedometer | None
    checkpoints: RunCheckpoints | None
    slow_down: Callable[[float], None]
    """Called with the seconds of each inner step: what a fault adds to it, usually nothing."""
    heartbeat: Heartbeat
    wishes: Wishes
    book: Logbook
    moments: ParamsAndMoments | None
    """If the run averages moments."""
    tokens: int = 0
    """Trained on by this island so far."""

    def event(self, name: str, text: str) -> None:
        """Record and log that something happened to the island; ranks other than the leader keep quiet."""
        if self.metrics is not None:
            log.info("%s: %s", name, text)
            self.metrics.event(EventRecord(name=name, text=text))
            self.book.note(name, text)


def device_of(island: IslandConfig) -> str:
    """`cpu` or `cuda:<local rank>`. Raises ConfigError when the device is not there."""
    if island.device == "cpu" or (island.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError("island.device is 'cuda', but torch finds no CUDA device; use auto or cpu")
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


@contextmanager
def process_group(island: IslandConfig, device: str) -> Iterator[Team]:
    """The island's own groups, and the team that its ranks are for the outer loop. Every rank must enter it."""
    torch.set_num_threads(1) if device == "cpu" else torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    timeout = timedelta(seconds=GROUP_SECONDS)
    if os.environ["WORLD_SIZE"] == "1":
        dist.init_process_group(backend_of(device), store=dist.HashStore(), rank=0, world_size=1)
    else:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        # torchrun keeps its store when it starts ranks again: what their last life has left there must not be read.
        store = dist.PrefixStore(f"life-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend_of(device), store=store, rank=rank, world_size=size, timeout=timeout)
    if dist.get_world_size() != island.ranks:
        raise ConfigError(
            f"island.ranks is {island.ranks}, but {dist.get_world_size()} processes were started; "
            f"give torchrun --nproc-per-node {island.ranks}, or set island.ranks={dist.get_world_size()}"
        )
    if island.ranks == 1:
        yield Team()
        return
    names = "the team", "the team in background"
    group, background = (dist.new_group(backend="gloo", timeout=timeout, group_desc=name) for name in names)
    assert not isinstance(group, int) and not isinstance(background, int), "every rank is in the group of all ranks"
    yield Team(group, background)


def backend_of(device: str) -> str:
    """gloo computes on the CPU, NCCL on GPUs; CPU tensors travel by gloo in both."""
    return "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"


def build_trainer(
    config: RunConfig, island: IslandConfig, corpus: Corpus, device: str, *, num_islands: int = 1
) -> Trainer:
    """The inner trainer; with `num_islands` the data-parallel one that takes all their tokens in each step."""
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


def load_corpus(config: RunConfig, island: IslandConfig) -> Corpus:
    """The island's text, from its cache or tokenised now."""
    return prepare_corpus(data_of(config, island), Path(island.cache_dir).expanduser())


@contextmanager
def assembled(
    config: RunConfig, island: IslandConfig, team: Team, device: str, folder: Path, shared: Shared | None = None
) -> Iterator[Parts]:
    """One rank's parts, its network connections open. Every rank of the island must enter it.

    `shared`: what it has in common with the other islands of this process, if there are any.
    """
    started_at = time.time()
    corpus = load_corpus(config, island)
    num_sequences = config.optimizer.tokens_per_step // config.data.seq_len
    num_islands = config.outer.start_islands
    batches = IslandBatches(corpus, config.data.seq_len, config.seed, num_islands, num_sequences)
    trainer = build_trainer(config, island, corpus, device)
    lock = hold_folder(folder) if team.is_leader else None
    metrics = open_metrics(config, island, folder) if team.is_leader else None
    book = Logbook(folder.parent, island.island)
    if team.is_leader:
        book.started(config, island)
    wishes = Wishes(team, folder, island.max_hours, started_at)
    # A lone island needs no network.
    hub, loop = (Hub(), LoopThread()) if shared is None else (shared.hub, shared.loop)
    network = connect(config, island, team, loop, folder, hub)
    try:
        identity = Identity(
            island=island.island,
            incarnation=team.broadcast(secrets.token_hex(8)),
            identity=team.on_leader(lambda: lasting_identity(folder)),
            config_hash=config.hash,
        )
        hooks = build_hooks(island.faults, island.index, team.rank, folder)
        settings = settings_of(config, island, folder, hooks)
        moments = None if config.outer.moments is None else ParamsAndMoments(trainer.params, trainer.optimizers)
        build = OuterLoop if config.outer.gossip is None else GossipLoop
        outer = build(config.outer, identity, moments or trainer.params, team, network, loop, settings)
        Probe(network.messenger, Greeter(config.hash, lambda: outer.position.round))
        speed = speedometer(config, island, corpus, device) if team.is_leader else None
        # Islands of one process are threads, and a checkpoint's ranks talk over torch's groups of the whole process.
        saving = opened(config, island, folder, trainer, outer) if shared is None else nullcontext()
        with saving as checkpoints, Profiler(island.profile, folder / "profile", team.rank) as profiler:
            yield Parts(
                config,
                island,
                corpus,
                batches,
                trainer,
                outer,
                network,
                loop,
                profiler,
                metrics,
                speed,
                checkpoints,
                partial(slow_down, hooks),
                Heartbeat(island.watchdog_seconds),
                wishes,
                book,
                moments,
            )
    finally:
        wishes.close()
        close_network(network, loop)
        if shared is None:
            loop.close()
        if metrics is not None:
            metrics.close()
        if lock is not None:
            os.close(lock)


def settings_of(config: RunConfig, island: IslandConfig, folder: Path, hooks: Hooks) -> Settings:
    """What the outer loop does on this island besides the run's config."""
    waits_for_all = config.outer.wait_for == "all"
    # A round's, and one re-based; with listeners also of a fragment whose plan was fixed before it was given.
    num_rounds = 2 if waits_for_all else 4
    return Settings(
        max_tokens=num_rounds * config.outer.inner_steps * config.optimizer.tokens_per_step,
        joins=island.joins,
        index=island.index,
        seed=config.seed,
        cache_dir=folder / "incoming",
        hooks=hooks,
        total_tokens=None if waits_for_all else config.total_tokens,
    )


def close_network(network: Network, loop: LoopThread) -> None:
    """Free sockets and processes of a rank."""
    try:
        loop.run(network.close(), timeout_seconds=CLOSE_SECONDS)
    except TimeoutError:
        log.warning("the network did not close within %.0f s", CLOSE_SECONDS)


def connect(config: RunConfig, island: IslandConfig, team: Team, loop: LoopThread, folder: Path, hub: Hub) -> Network:
    """The rank's connections to other islands; the leader checks that they run the same config."""
    leader_address = None
    network = None
    for turn in ("leader", "others"):
        if team.is_leader == (turn == "leader"):
            settings = NetworkSettings(
                run_id=config.name,
                island=island.island,
                rank=team.rank,
                bootstrap=island.bootstrap,
                listen_host=island.listen_host,
                listen_port=island.listen_port,
                announce_host=island.announce_host,
                run_key=run_key_in(island.run_key_file),
                allow=island.allow,
                relay=island.relay,
                identity_path=folder / "identity.key",
                hub=hub,
                leader_address=leader_address,
                connect_seconds=island.connect_seconds,
            )
            network = loop.run(open_network(config.outer.transport, settings))
        leader_address = team.broadcast(network.leader_address if team.is_leader and network else None)
    assert network is not None
    if network.membership is not None:
        theirs = loop.run(network.membership.read_config())
        check_same_run(config, theirs)
        loop.run(network.membership.publish_config(dump_config(config)))
    return network


def check_same_run(ours: RunConfig, theirs: str | None) -> None:
    """Raise ConfigError, naming the keys, unless the swarm's config of this run (None: there is none) is ours."""
    if theirs is None:
        return
    run = parse_config(theirs, where="the swarm's config").run
    if run.hash != ours.hash:
        differences = "\n".join(f"  {line}" for line in differing_keys(ours, run))
        raise ConfigError(
            f"the swarm's run {ours.name!r} has another config than this island:\n{differences}\n"
            "use the run's own (`diloco join ADDRESS` fetches it), or give this run another name"
        )


def lasting_identity(folder: Path) -> str:
    """What an island restarted in the same folder is known by, whatever became of its earlier processes."""
    path = folder / "identity"
    if not path.exists():
        write_atomically(path, secrets.token_hex(16))
    return path.read_text()


def open_metrics(config: RunConfig, island: IslandConfig, folder: Path) -> Metrics:
    """The island's metrics.jsonl and what other sinks its config names."""
    sinks = build_sinks(island, folder, run_name=f"{config.name}/{island.island}", settings=config.model_dump())
    return Metrics(folder / "metrics.jsonl", sinks)
