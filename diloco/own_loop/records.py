"""Handle what happens around the rounds of an island with its own loop: records, moments, operator
requests.
"""

import logging
from collections.abc import Callable

from diloco.assemble import describe_reading
from diloco.config.schema import RunConfig
from diloco.island_rounds.of_all import IslandRounds
from diloco.island_rounds.of_quorum import QuorumIslandRounds
from diloco.own_loop.own_data import OwnData
from diloco.participation import Participation
from diloco.records.metrics import StepRecord
from diloco.runtime.progress import NO_PROGRESS, Progress
from outer.leases.ledger import Ledger
from outer.report import CaughtUp, Landing, RoundReport
from outer.rounds.quorum import CommittedRound

log = logging.getLogger(__name__)


class LoopEvents:
    """RoundEvents of an island with its own loop. Only the leader has metrics, so only its events
    are written.
    """

    def __init__(
        self, participation: Participation, text: OwnData | None, before_round: Callable[[], None]
    ) -> None:
        """`text`: what the config names. `before_round` is called before the island contributes to
        a round.
        """
        self._participation = participation
        self._text = text
        self._before_round = before_round
        self.landed_report: RoundReport | None = None
        """Report of the round that has landed since this was last set to None."""
        self.tokens = 0
        """Number of tokens that the island has trained on since it was started."""
        self._num_steps = 0
        self._has_averaged = False

    def begins(self, inner_step: int, ledger: Ledger) -> None:
        """Switch the text to the stage of the ledger. The loop's own schedule counts the steps
        itself.
        """
        text = self._text
        borders = ledger.borders
        if text is not None and text.enter_stage(borders):
            what = describe_reading(text.config)
            self._participation.event(
                "stage", f"{text.stage + 1} from unit {borders[-1].first}: {what}"
            )

    def launches(self, progress: Progress) -> None:
        if progress != NO_PROGRESS:
            self._before_round()
        self._participation.rounds.contribution = progress

    def waits(self) -> None:
        """Do nothing. The duration of this loop's steps is not monitored."""

    def landed(self, number: int, progress: Progress, landing: Landing) -> None:
        self._participation.count_moments(number)
        self.record_round(progress, landing, self._participation.outer.position.ledger)

    def record_round(self, progress: Progress, landing: Landing, ledger: Ledger) -> None:
        """Record the attempt that committed, and what was refused from peers."""
        self.landed_report = landing.reports[-1]
        self._has_averaged |= progress != NO_PROGRESS
        self._participation.record_round(progress, landing, ledger)

    def caught_up(self, caught: CaughtUp, progress: Progress) -> None:
        self._participation.record_catch_up(caught, progress, self._participation.outer.position)

    def may_save(self, *, is_asked: bool) -> None:
        """Do nothing. The loop saves by itself, with `Islands.state_dict`."""

    def why_stop(self, num_rounds: int) -> str:
        return self._participation.requests.poll(num_rounds).stop

    def note_leave(self, why: str, inner_steps: int) -> None:
        """Record that the loop leaves before the run is over. Warn if the island contributed to no
        round.
        """
        text = f"{why}; {self._participation.outer.position.round} rounds are done"
        if not self._has_averaged and self._participation.metrics is not None:
            problem = (
                "nothing that this island has trained was averaged with the others: inner steps "
                f"that islands.step counted: {self._num_steps}, and a round has {inner_steps}; "
                "call islands.step(tokens=...) after each optimizer.step(), until islands.is_over"
            )
            log.warning("%s", problem)
            text += f"; {problem}"
        self._participation.event("left", text)

    def write_step(
        self,
        number: int,
        tokens: int,
        seconds: float,
        lr: float,
        loss: float | None,
        sources: dict[str, int],
    ) -> None:
        """Record inner step `number` of the run, for which this island used `tokens` tokens."""
        self.tokens += tokens
        self._num_steps += 1
        metrics = self._participation.metrics
        if metrics is not None:
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
            metrics.write(record)


class QuorumLoopEvents:
    """QuorumEvents of an island with its own loop."""

    def __init__(self, events: LoopEvents, participation: Participation) -> None:
        self._events = events
        self._participation = participation

    def begins(self, inner_step: int, ledger: Ledger) -> None:
        self._events.begins(inner_step, ledger)

    def launches(self, progress: Progress) -> None:
        self._events.launches(progress)

    def landed(self, committed: CommittedRound, made: Progress, cycle: int) -> None:
        self._events.launches(NO_PROGRESS)
        given = made if committed.is_given else NO_PROGRESS
        self._events.record_round(given, committed.landing, committed.position.ledger)
        if committed.is_dropped:
            self._participation.record_dropped(made)

    def caught_up(self, caught: CaughtUp, progress: Progress) -> None:
        self._events.launches(NO_PROGRESS)
        self._events.caught_up(caught, progress)

    def may_save(self) -> None:
        """Do nothing. The loop saves by itself, with `Islands.state_dict`."""

    def contributed(self, num_rounds: int) -> str:
        return self._events.why_stop(num_rounds)


def build_rounds(
    participation: Participation, run: RunConfig, events: LoopEvents
) -> IslandRounds | QuorumIslandRounds:
    """Return the object that turns the loop's steps into rounds: rounds of all islands, or of a
    quorum.
    """
    outer = participation.outer
    if run.outer.wait_for == "all":
        return IslandRounds(outer, run.outer.num_rounds, events)
    return QuorumIslandRounds(outer, run, QuorumLoopEvents(events, participation), pauses=True)
