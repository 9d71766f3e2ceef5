"""The records, connections and outer loop of one rank, for whatever code trains the model.

`diloco train` (assemble.py) and other training loops (own_loop/islands.py) both open it. It knows
nothing of the inner trainer, only the parameters that are averaged.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from diloco.alerts.watch import watch_for_alerts
from diloco.config.check import count_experts_per_token
from diloco.config.schema import (
    IslandConfig,
    RunConfig,
    most_tokens_per_step,
    stage_rounds,
    stage_tokens,
)
from diloco.connections import Shared, open_connections
from diloco.faults.self_inflicted import build_hooks
from diloco.records.logbook import Logbook
from diloco.records.metrics import STARTED_AGAIN, EventRecord, Metrics
from diloco.records.run_folder import hold_folder
from diloco.records.sinks import build_sinks
from diloco.runtime.operator_requests import OperatorRequests
from diloco.runtime.progress import Progress
from diloco.runtime.round_records import RoundRecords
from diloco.runtime.text_print import text_print
from diloco.status.visitors import Equipment, serve_visitors
from diloco.watchdog.rank_notes import note_folder
from inner.data.corpus import Corpus
from inner.optim.moments import ParamsAndMoments
from outer.agreement.running.peers import Identity
from outer.connect.settings import Network
from outer.hooks import Hooks
from outer.identity.island_key import IslandKey
from outer.leases.ledger import Ledger
from outer.loop import OuterLoop, build_loop
from outer.network.event_loop import EventLoop
from outer.report import CaughtUp, Landing, LoopSettings
from outer.space.ranks import RankGroup
from outer.space.redistribute import Params
from outer.state.part_state import Position

log = logging.getLogger(__name__)


@dataclass
class Participation:
    """This rank's records, connections and outer loop.

    Only the leader has metrics and writes events.
    """

    outer: OuterLoop
    network: Network
    event_loop: EventLoop
    hooks: Hooks
    metrics: Metrics | None
    book: Logbook
    requests: OperatorRequests
    rounds: RoundRecords
    moments: ParamsAndMoments | None
    """Parameters with their moments, if the run averages moments."""
    on_entry: Callable[[], None] = lambda: None
    """Called once the other islands and the island's own saved state have accepted its config."""

    def event(self, name: str, text: str) -> None:
        """Record and log an event of the island. Only the leader does anything."""
        if self.metrics is None:
            return
        log.info("%s: %s", name, text)
        self.metrics.write(EventRecord(name=name, text=text))
        self.book.note(name, text)

    def record_entry(self, position: Position) -> None:
        """Record the position at which the island starts, or goes on after it has taken others'
        state.
        """
        self.on_entry()
        digest = self.outer.digest[:12]
        self.event("joined", f"round {position.round}, {position.tokens} tokens, digest {digest}")

    def record_catch_up(self, caught: CaughtUp, progress: Progress, position: Position) -> None:
        """Record that the island has taken another island's state, and whether its progress was
        kept.

        If it was dropped, averaged moments are those of the taken state, and are corrected for it.
        """
        fate = "kept" if caught.is_kept else "dropped"
        self.event("caught up", f"{caught}; {progress.steps} inner steps {fate}")
        self.record_entry(position)
        if not caught.is_kept:
            self.count_moments()

    def record_round(
        self,
        progress: Progress,
        landing: Landing,
        ledger: Ledger,
        times: list[list[float]] | None = None,
    ) -> None:
        """Record the committed attempt, and what was refused from peers since the last one.

        `times`: times of the island's ranks (watchdog/rank_times.py), or None.
        """
        self.rounds.write(landing.reports[-1], progress, landing.waited_seconds, ledger, times)
        if self.metrics is None:
            return
        for peer, kind, text, count in self.network.rejections.drain():
            often = f" ({count} times)" if count > 1 else ""
            self.metrics.write(EventRecord(name="refused", text=f"{peer}: {kind}: {text}{often}"))

    def record_dropped(self, progress: Progress) -> None:
        """Record that inner steps count for nothing: their text is leased to others, a stage has
        ended, or the round went back.
        """
        why = (
            "their text is leased to this island no longer, or the round went back to an "
            "earlier state"
        )
        self.event("dropped", f"{progress.steps} inner steps: {why}")

    def record_ledger(self) -> None:
        """Record at the end how much of the text the run has trained on."""
        text = self.outer.position.ledger
        self.event(
            "account", f"{text.trained} units of text trained; {text.open} reserved and not used"
        )

    def count_moments(self, landed: int | None = None) -> None:
        """Correct the bias of averaged moments for the number of steps behind them.

        These are the steps of the landed round, or of a taken state if `landed` is None.
        """
        if self.moments is not None:
            self.moments.set_steps(self.outer.moment_steps(landed))


@contextmanager
def open_participation(
    config: RunConfig,
    island: IslandConfig,
    ranks: RankGroup,
    folder: Path,
    params: Params,
    equipment: Equipment,
    *,
    moments: ParamsAndMoments | None = None,
    wait_for_corpus: Callable[[], Corpus | None] = lambda: None,
    beat: Callable[[], None] = lambda: None,
    loss_scale: Callable[[], int | None] = lambda: None,
    shared: Shared | None = None,
) -> Iterator[Participation]:
    """Open records and connections, and build the outer loop over `params`, which contain `moments`
    if the run averages them.

    Every rank of the island must enter it. `wait_for_corpus` is called before the island connects,
    because the others must not wait for an island that still loads text. `beat` is called at each
    sign of life of a round. `loss_scale`: see LoopSettings. `shared` is given if other islands run
    in this process. Raises InputError, ConfigError or OuterError.
    """
    with ExitStack() as stack:
        started_at = time.time()
        metrics = (
            stack.enter_context(open_records(config, island, folder)) if ranks.is_leader else None
        )
        requests = OperatorRequests(ranks, folder, island.max_hours, started_at)
        stack.callback(requests.close)
        corpus = wait_for_corpus()
        network, event_loop = stack.enter_context(
            open_connections(config, island, ranks, folder, shared)
        )
        identity = build_identity(config, island, ranks, network.island_key, corpus)
        hooks = build_hooks(island.faults, island.index, ranks.rank, folder)
        rounds = RoundRecords(metrics, config.outer.start_islands, beat)
        settings = replace(
            build_loop_settings(config, island, folder, hooks, rounds), loss_scale=loss_scale
        )
        outer = build_loop(config.outer, identity, params, ranks, network, event_loop, settings)
        rounds.find_ledger = lambda: outer.position.ledger
        visited = serve_visitors(config, island, network, outer, metrics, equipment)
        if visited is not None:
            stack.callback(visited.linger, event_loop)
        yield Participation(
            outer=outer,
            network=network,
            event_loop=event_loop,
            hooks=hooks,
            metrics=metrics,
            book=Logbook(folder.parent, island.label),
            requests=requests,
            rounds=rounds,
            moments=moments,
        )


@contextmanager
def open_records(config: RunConfig, island: IslandConfig, folder: Path) -> Iterator[Metrics]:
    """Lock the island's folder, and open its metrics.jsonl and the sinks that its config names.

    Leader only.
    """
    lock = hold_folder(folder)
    try:
        note_folder(folder)
        metrics = open_metrics(config, island, folder)
        try:
            last_end = Logbook(folder.parent, island.label).note_start(config, island)
            if last_end:
                metrics.write(EventRecord(name=STARTED_AGAIN, text=last_end))
            with watch_for_alerts(island.alerts, config.name, island.label, folder, metrics):
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
    waits_for_all = config.outer.wait_for == "all"
    num_rounds = 2 if waits_for_all else 4
    return LoopSettings(
        max_tokens=num_rounds * config.outer.inner_steps * most_tokens_per_step(config),
        experts_per_token=count_experts_per_token(config),
        stage_rounds=stage_rounds(config) if waits_for_all else (),
        stage_tokens=() if waits_for_all else stage_tokens(config),
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
    sinks = build_sinks(
        island, folder, run_name=f"{config.name}/{island.label}", settings=config.model_dump()
    )
    return Metrics(folder / "metrics.jsonl", sinks)
