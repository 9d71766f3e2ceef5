"""An island's life in a run whose rounds wait for a quorum only (`outer.wait_for: quorum`).

    (inner step, land what was committed) x own inner steps -> give, wait for the round -> ... until the tokens are done

Every rank runs it, in step with the others. Islands give different numbers of times, so where the run stands follows
from the committed tokens, not from rounds: a cycle is over when as many tokens are committed as all islands that begin
train on in `outer.inner_steps` steps.
"""

from dataclasses import replace

from diloco import island as by_rounds
from diloco.assemble import Parts
from diloco.config import RunConfig
from diloco.island import NOTHING, Progress, enter, evaluate, record_round, train
from outer.listening import Heard
from outer.reports import CaughtUp


def run(parts: Parts) -> None:
    """An island's life, by rounds that wait for all or at its own pace. Raises TrainingStopped or OuterError."""
    if parts.config.outer.wait_for == "all":
        by_rounds.run(parts)
        return
    enter(parts, parts.outer.begin())
    evaluate(parts, 0)
    parts.outer.listening.start()
    life = OwnPace(parts)
    while not parts.outer.listening.is_over:
        try:
            life.turn()
        except CaughtUp as caught:
            life.go_on(caught)
    parts.outer.finish()
    parts.event("left", f"the run's {parts.config.outer.rounds} rounds' tokens are committed")


def place(config: RunConfig, tokens: int) -> int:
    """Inner steps of the run that so many committed tokens are, if all islands that begin had made as many."""
    return tokens // (config.optimizer.tokens_per_step * config.outer.start_islands)


class OwnPace:
    """The island's progress since it gave last, and how far it has read its data."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.made = NOTHING
        self.data_step = self._place
        """Of this island's own share. Who enters late begins where the others are about to be."""
        self.cycle = self._place // parts.config.outer.inner_steps
        """Of the last evaluation."""

    def turn(self) -> None:
        """One inner step, and what was committed meanwhile; or, when that is due, give to a round and wait for it."""
        outer = self.parts.outer
        if outer.listening.is_due():
            self.land(outer.give(self.made.tokens))
            return
        self.parts.trainer.inner_step = self._place + self.made.steps
        result = train(self.parts, self.data_step)
        self.data_step += 1
        self.made += Progress(1, 0 if result.is_skipped else result.tokens)
        for heard in outer.heard(self.made.tokens):
            self.land(heard)

    def land(self, heard: Heard) -> None:
        """Record a round that is committed; evaluate when it completes a cycle."""
        given = self.made if heard.is_given else NOTHING
        for report in heard.landing.reports:
            # A plan may be long in coming while the island trains: only standing still is a wait.
            stood = max(heard.landing.waited_seconds - report.reduce_seconds, 0.0)
            report = replace(report, wait_seconds=min(report.wait_seconds, stood))
            record_round(self.parts, report, given, heard.landing)
        if heard.is_given:
            self.made = NOTHING
        every, last = self.parts.config.evaluate.every_rounds, self.parts.config.outer.rounds
        cycle = min(place(self.parts.config, heard.position.tokens) // self.parts.config.outer.inner_steps, last)
        if cycle > self.cycle and (cycle // every > self.cycle // every or cycle == last):
            evaluate(self.parts, cycle)
        self.cycle = cycle

    def go_on(self, caught: CaughtUp) -> None:
        """Others have committed without this island: it has their state now, and goes on from there."""
        progress, self.made = self.made, self.made if caught.is_kept else NOTHING
        fate = "kept" if caught.is_kept else "dropped"
        self.parts.event("caught up", f"{caught}; {progress.steps} inner steps {fate}")
        enter(self.parts, self.parts.outer.listening.position)

    @property
    def _place(self) -> int:
        return place(self.parts.config, self.parts.outer.listening.position.tokens)
