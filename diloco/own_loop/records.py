"""Handle what happens around the rounds of an island with its own loop: records, moments, operator
requests."""

import logging
from collections.abc import Callable
from pathlib import Path

from diloco.assemble import describe_reading
from diloco.config.schema import IslandConfig, RunConfig
from diloco.island_rounds.of_all import IslandRounds
from diloco.island_rounds.of_quorum import QuorumIslandRounds
from diloco.own_loop.own_data import OwnData
from diloco.records.logbook import Logbook
from diloco.records.metrics import EventRecord, Metrics, StepRecord
from diloco.runtime.operator_requests import OperatorRequests
from diloco.runtime.progress import NO_PROGRESS, Progress
from diloco.runtime.round_records import RoundRecords
from inner.optim.moments import ParamsAndMoments
from outer.connect.settings import Network
from outer.leases.ledger import Ledger
from outer.loop import OuterLoop
from outer.report import CaughtUp, Landing, RoundReport
from outer.rounds.quorum import CommittedRound

log = logging.getLogger(__name__)


class LoopEvents:
    """RoundEvents of an island with its own loop. Only the leader has metrics, so only its events
    are written."""

    def __init__(
        self,
        outer: OuterLoop,
        network: Network,
        rounds: RoundRecords,
        requests: OperatorRequests,
        metrics: Metrics | None,
        moments: ParamsAndMoments | None,
    ) -> None:
        self._outer, self._network, self._rounds = outer, network, rounds
        self._requests, self._metrics, self._moments = requests, metrics, moments
        self.book: Logbook | None = None
        """The logbook of the run, on the leader."""
        self.text: OwnData | None = None
        """The text that the config names."""
        self.landed_report: RoundReport | None = None
        """Report of the round that has landed since this was last set to None."""
        self.tokens = 0
        """Number of tokens that the island has trained on since it was started."""
        self._num_steps, self._has_averaged = 0, False
        self.on_entry: Callable[[], None] = lambda: None
        """Called when the island has entered the run, so that neither other islands nor its saved
        state have refused it."""
        self.before_round: Callable[[], None] = lambda: None
        """Called before the island contributes to a round."""

    def keep_book(self, folder: Path, island: IslandConfig) -> None:
        """Also write later events to the logbook of the run."""
        self.book = Logbook(folder.parent, island.label)

    def begins(self, inner_step: int) -> None:
        """Switch the text to the stage of the round. The loop's own schedule counts the steps
        itself."""
        borders = self._outer.position.ledger.borders
        if self.text is not None and self.text.enter_stage(self._outer.round, borders):
            number, what = self.text.stage + 1, describe_reading(self.text.config)
            self.note("stage", f"{number} from unit {borders[-1].first}: {what}")

    def launches(self, progress: Progress) -> None:
        if progress != NO_PROGRESS:
            self.before_round()
        self._rounds.contribution = progress

    def waits(self) -> None:
        """Do nothing. The duration of this loop's steps is not monitored."""

    def landed(self, number: int, progress: Progress, landing: Landing) -> None:
        self.count_moments(number)
        self.record_round(progress, landing, self._outer.position.ledger)

    def record_round(self, progress: Progress, landing: Landing, ledger: Ledger) -> None:
        """Record the attempt that committed, and what was refused from peers."""
        self.landed_report = landing.reports[-1]
        self._has_averaged |= progress != NO_PROGRESS
        self._rounds.write(landing.reports[-1], progress, landing.waited_seconds, ledger)
        if self._metrics is not None:
            for peer, kind, text, count in self._network.rejections.drain():
                self._metrics.write(EventRecord(name="refused", text=f"{peer}: {kind}: {text} ({count} times)"))

    def caught_up(self, caught: CaughtUp, progress: Progress) -> None:
        fate = "kept" if caught.is_kept else "dropped"
        self.note("caught up", f"{caught}; {progress.steps} inner steps {fate}")
        self.note_entry()
        if not caught.is_kept:
            self.count_moments()

    def may_save(self, *, is_asked: bool) -> None:
        """Do nothing. The loop saves by itself, with `Islands.state_dict`."""

    def why_stop(self, num_rounds: int) -> str:
        return self._requests.poll(num_rounds).stop

    def count_moments(self, landed: int | None = None) -> None:
        """Correct the bias of averaged moments for their number of steps, after a landed round or a
        taken state."""
        if self._moments is not None:
            self._moments.set_steps(self._outer.moment_steps(landed))

    def note(self, name: str, text: str) -> None:
        """Record and log an event of the island. Does nothing on ranks other than the leader."""
        if self._metrics is None:
            return
        log.info("%s: %s", name, text)
        self._metrics.write(EventRecord(name=name, text=text))
        if self.book is not None:
            self.book.note(name, text)

    def note_entry(self) -> None:
        """Record the position from which the island starts, or continues after taking another
        island's state."""
        self.on_entry()
        position = self._outer.position
        self.note("joined", f"round {position.round}, {position.tokens} tokens, digest {self._outer.digest[:12]}")

    def note_leave(self, why: str, inner_steps: int) -> None:
        """Record that the loop leaves before the run is over. Warn if the island contributed to no
        round."""
        text = f"{why}; {self._outer.position.round} rounds are done"
        if not self._has_averaged and self._metrics is not None:
            problem = (
                "nothing that this island has trained was averaged with the others: inner steps that islands.step "
                f"counted: {self._num_steps}, and a round has {inner_steps}; call islands.step(tokens=...) after each "
                "optimizer.step(), until islands.is_over"
            )
            log.warning("%s", problem)
            text += f"; {problem}"
        self.note("left", text)

    def write_step(
        self, number: int, tokens: int, seconds: float, lr: float, loss: float | None, sources: dict[str, int]
    ) -> None:
        """Record inner step `number` of the run, for which this island used `tokens` tokens."""
        self.tokens += tokens
        self._num_steps += 1
        if self._metrics is not None:
            speed = tokens / seconds if seconds > 0 else 0.0
            record = StepRecord(
                step=number,
                tokens=self.tokens,
                loss=loss,
                lr=lr,
                grad_norm=None,
                seconds=seconds,
                tokens_per_second=speed,
                source_tokens=sources,
            )
            self._metrics.write(record)


class QuorumLoopEvents:
    """QuorumEvents of an island with its own loop."""

    def __init__(self, events: LoopEvents) -> None:
        self._events = events

    def begins(self, inner_step: int) -> None:
        """Call LoopEvents.begins."""

    def launches(self, progress: Progress) -> None:
        self._events.launches(progress)

    def landed(self, committed: CommittedRound, made: Progress, cycle: int) -> None:
        self._events.launches(NO_PROGRESS)
        given = made if committed.is_given else NO_PROGRESS
        self._events.record_round(given, committed.landing, committed.position.ledger)
        if committed.is_dropped:
            self._events.note("dropped", f"{made.steps} inner steps: others have been given their text")

    def caught_up(self, caught: CaughtUp, progress: Progress) -> None:
        self._events.launches(NO_PROGRESS)
        self._events.caught_up(caught, progress)

    def contributed(self, num_rounds: int) -> str:
        return self._events.why_stop(num_rounds)


def build_rounds(outer: OuterLoop, run: RunConfig, events: LoopEvents) -> IslandRounds | QuorumIslandRounds:
    """Return the object that turns the loop's steps into rounds: rounds of all islands, or of a
    quorum."""
    if run.outer.wait_for == "all":
        return IslandRounds(outer, run.outer.num_rounds, events)
    return QuorumIslandRounds(outer, run, QuorumLoopEvents(events), pauses=True)
