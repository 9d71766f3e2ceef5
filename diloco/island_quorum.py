"""An island's life in a run whose rounds wait for a quorum only (`outer.wait_for: quorum`).

    (inner step, land what was committed) x own inner steps -> give, wait for the round -> ... until the tokens are done

Every rank runs it, in step with the others. Islands give different numbers of times, so where the run stands follows
from the committed tokens, not from rounds: a cycle is over when as many tokens are committed as all islands that begin
train on in `outer.inner_steps` steps. Wishes are looked at, and checkpoints saved, when the island has given: it holds
no round then that others could commit meanwhile.
"""

from dataclasses import replace

from diloco import island as by_rounds
from diloco.assemble import Parts
from diloco.config import RunConfig
from diloco.island import enter, evaluate, record_round, resume, save, tell_account, train
from diloco.progress import NOTHING, Place, Progress
from outer.listening import Heard
from outer.reports import CaughtUp
from outer.sync import OuterLoop


def run(parts: Parts) -> None:
    """An island's life, by rounds that wait for all or at its own pace. Raises TrainingStopped or OuterError."""
    if parts.config.outer.wait_for == "all":
        by_rounds.run(parts)
        return
    outer = parts.outer
    assert isinstance(outer, OuterLoop), "gossip waits for nobody"
    parts.heartbeat.rest("entering the run")
    resumed = resume(parts)
    enter(parts, outer.begin())
    life = OwnPace(parts, outer)
    if resumed is not None and (resumed.round, resumed.digest) == (outer.position.round, outer.digest):
        life.take_up(resumed.place.made)
    else:
        evaluate(parts, life.cycle)
    outer.listening.start()
    while not outer.listening.is_over:
        try:
            life.turn()
        except CaughtUp as caught:
            life.go_on(caught)
        if life.stop and not outer.listening.is_over:
            parts.heartbeat.rest("leaving")
            outer.leave()
            parts.event("left", f"{life.stop}; {outer.listening.position.tokens} of the run's tokens are committed")
            return
    if parts.island.checkpoint.every_rounds is not None:
        life.save()
    parts.heartbeat.rest("leaving")
    outer.finish()
    tell_account(parts)
    parts.event("left", f"the run's {parts.config.outer.rounds} rounds' tokens are committed")


def place(config: RunConfig, tokens: int) -> int:
    """Inner steps of the run that so many committed tokens are, if all islands that begin had made as many."""
    return tokens // (config.optimizer.tokens_per_step * config.outer.start_islands)


class OwnPace:
    """The island's progress since it gave last, and where the run stood then."""

    def __init__(self, parts: Parts, outer: OuterLoop) -> None:
        self.parts, self.outer = parts, outer
        self.made = NOTHING
        self.cycle = self.saved_cycle = self._place // parts.config.outer.inner_steps
        """Of the last round that has landed; of the last checkpoint that was due."""
        self.stop = ""
        """Why the island leaves now."""

    def take_up(self, made: Progress) -> None:
        """Go on with progress that a checkpoint held."""
        self.made = made
        self.outer.listening.begin_progress(made.steps)

    def turn(self) -> None:
        """One inner step, and what was committed meanwhile; or, when that is due, give to a round and wait for it."""
        outer = self.outer
        # Only a commit gives this island more to read.
        if outer.listening.is_due() or outer.reading.num_left == 0:
            self.parts.heartbeat.rest("a round")
            self.land(outer.listening.give(self.made.tokens, holds=True))
            return
        self.parts.trainer.inner_step = self._place + self.made.steps
        result = train(self.parts)
        self.made += Progress(1, 0 if result.is_skipped else result.tokens)
        for heard in outer.listening.heard(self.made.tokens):
            self.land(heard)

    def land(self, heard: Heard) -> None:
        """Record a round that is committed; save and evaluate when that is due."""
        given = self.made if heard.is_given else NOTHING
        for report in heard.landing.reports:
            # A plan may be long in coming while the island trains: only standing still is a wait.
            stood = max(heard.landing.waited_seconds - report.reduce_seconds, 0.0)
            report = replace(report, wait_seconds=min(report.wait_seconds, stood))
            record_round(self.parts, report, given, heard.landing, heard.position.account)
        if heard.is_dropped:
            self.parts.event("dropped", f"{self.made.steps} inner steps: others have been given their text")
        if heard.is_given or heard.is_dropped:
            self.made = NOTHING
        last = self.parts.config.outer.rounds
        before = self.cycle
        self.cycle = min(place(self.parts.config, heard.position.tokens) // self.parts.config.outer.inner_steps, last)
        if heard.is_given:
            self._fulfil(heard.position.round)
        if is_over(before, self.cycle, self.parts.config.evaluate.every_rounds, last):
            evaluate(self.parts, self.cycle)

    def save(self) -> None:
        """A checkpoint of where the island is. Training goes on whatever comes of it."""
        self.saved_cycle = self.cycle
        self.parts.trainer.inner_step = self._place + self.made.steps
        save(self.parts, Place(self.made.steps, self.made))

    def go_on(self, caught: CaughtUp) -> None:
        """Others have committed without this island: it has their state now, and goes on from there."""
        progress, self.made = self.made, self.made if caught.is_kept else NOTHING
        fate = "kept" if caught.is_kept else "dropped"
        self.parts.event("caught up", f"{caught}; {progress.steps} inner steps {fate}")
        enter(self.parts, self.outer.listening.position)

    def _fulfil(self, num_rounds: int) -> None:
        """Save and leave as is due and as the operator wishes, the round held that this island gave to."""
        parts, every = self.parts, self.parts.island.checkpoint.every_rounds
        wish = parts.wishes.next(num_rounds)
        self.stop = wish.stop
        is_due = every is not None and self.cycle // every > self.saved_cycle // every
        if (wish.save or wish.stop or is_due) and not self.outer.listening.is_over:
            self.save()
        if not wish.stop:
            self.outer.listening.go_on()

    @property
    def _place(self) -> int:
        return place(self.parts.config, self.outer.listening.position.tokens)


def is_over(before: int, cycle: int, every: int, last: int) -> bool:
    """Whether with these cycles every so many, or all, are over."""
    return cycle > before and (cycle // every > before // every or cycle == last)
