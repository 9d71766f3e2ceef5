"""What an island does around rounds that wait for all islands, and around gossip rounds."""

from diloco.assemble import Runtime
from diloco.island_duties.actions import await_round, evaluate, save
from diloco.island_duties.going_back import GoingBack
from diloco.island_records import record_round
from diloco.island_rounds.of_all import IslandRounds
from diloco.runtime.progress import Progress
from outer.leases.ledger import Ledger
from outer.report import CaughtUp, Landing


class IslandDuties:
    """Implements `Duties` and `RoundEvents` for rounds of all islands."""

    def __init__(self, runtime: Runtime, *, has_saved: bool) -> None:
        self.runtime = runtime
        self.rounds = IslandRounds(runtime.outer, runtime.config.outer.num_rounds, self)
        self.going_back = GoingBack(runtime)
        self.has_saved = has_saved
        """Whether the island has a checkpoint. Without one it saves after its next commit, due or
        not.
        """

    @property
    def cycle(self) -> int:
        return self.runtime.outer.position.round // self.runtime.config.outer.fragments

    @property
    def progress(self) -> str:
        return (
            f"{self.runtime.outer.position.round} of the run's "
            f"{self.runtime.config.outer.num_rounds} rounds are done"
        )

    @property
    def result(self) -> str:
        return f"the run's {self.runtime.config.outer.rounds} rounds are done"

    @property
    def first_unproven(self) -> int | None:
        return self.runtime.trainer.broken_since

    def end(self) -> None:
        """Do nothing: the last round has been saved when it landed."""

    def begins(self, inner_step: int, ledger: Ledger) -> None:
        self.runtime.trainer.inner_step = inner_step
        self.runtime.enter_stage(ledger)

    def launches(self, progress: Progress) -> None:
        await_round(self.runtime)
        self.runtime.participation.rounds.contribution = progress

    def waits(self) -> None:
        await_round(self.runtime)

    def landed(self, number: int, progress: Progress, landing: Landing) -> None:
        runtime = self.runtime
        outer = self.runtime.outer
        if landing.reports[-1].earlier is not None:
            self.going_back.go_back(landing.reports[-1].earlier)
        else:
            runtime.participation.count_moments(number)
        runtime.trainer.lower_loss_scale(landing.reports[-1].loss_scale)
        self.going_back.is_well()
        record_round(runtime, progress, landing, outer.position.ledger)
        cycle, rest = divmod(outer.position.round, runtime.config.outer.fragments)
        is_last = outer.position.round == runtime.config.outer.num_rounds
        if rest == 0 and (is_last or cycle % runtime.config.evaluate.every_rounds == 0):
            evaluate(runtime, cycle)
        every = runtime.island.checkpoint.every_rounds
        if every is not None and (
            not self.has_saved or (rest == 0 and (is_last or cycle % every == 0))
        ):
            self.may_save(is_asked=True)

    def caught_up(self, caught: CaughtUp, progress: Progress) -> None:
        self.runtime.participation.record_catch_up(caught, progress, self.runtime.outer.position)

    def may_save(self, *, is_asked: bool) -> None:
        """Save a checkpoint if `is_asked` or if the operator requests it.

        Training goes on if that fails.
        """
        if is_asked or self.runtime.participation.requests.poll(self.runtime.outer.round).save:
            self.has_saved = True
            save(self.runtime, self.rounds.resume_point)

    def why_stop(self, num_rounds: int) -> str:
        return self.runtime.participation.requests.poll(num_rounds).stop
