"""Rounds that wait for a quorum (`outer.wait_for`), one after the other in a thread of their own.

    that thread     listen or give -> plan -> reduce -> vote -> commit -> listen ...        global params
    training        step, land, step, land, ... give, wait, land, step ...                  local params

Who still trains listens: rounds are committed here while its inner steps are computed, as many as others make. Between
two steps its local params land: they go on from the new global params, their progress kept. When its inner steps are
done it gives, and waits for that round. If the plan had been fixed by then it gives to the next one.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from outer.averaging import Averaging, Side
from outer.errors import BehindError
from outer.fragments import Schedule
from outer.island_state import Snapshot
from outer.offer import Offer
from outer.reports import CaughtUp, Landing
from outer.state import Position

CatchUp = Callable[[BehindError, int], CaughtUp]
"""Take the state that survives; the number is the tokens of this island's progress."""


@dataclass(frozen=True)
class Heard:
    """A round that is committed here."""

    landing: Landing
    fragment: int
    position: Position
    """After it."""
    is_given: bool
    """Whether this island's progress is in it."""
    is_dropped: bool = False
    """Whether this island's progress was given up, for others have been given what it read."""


class Listening:
    """Of one rank. Every rank of the island builds it and makes the same calls in the same order."""

    def __init__(
        self, averaging: Averaging, side: Side, schedule: Schedule, total_tokens: int | None, catch_up: CatchUp
    ) -> None:
        self._averaging, self._side, self._team, self._schedule = averaging, side, side.team, schedule
        self._total_tokens, self._catch_up = total_tokens, catch_up
        self._begin_from(side.held.mine.position)
        self.begin_progress()

    def start(self) -> None:
        """Listen from now on, from the state that this island holds."""
        self._begin_from(self._side.held.mine.position)
        name = f"{threading.current_thread().name} rounds"
        # A daemon: a process that is told to stop does not wait for the others of its last round.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin_progress(self, num_steps: int = 0) -> None:
        """What this island gives next has begun so many inner steps ago."""
        made, schedule = self._side.pace.num_steps - num_steps, self._schedule
        self._gave_at = made
        # As if each fragment had been given in its turn before.
        self._fragment_given_at = [made + schedule.end(f) - schedule.inner_steps for f in range(schedule.fragments)]

    @property
    def is_over(self) -> bool:
        """Whether the run's tokens are committed."""
        return self._is_last(self.position)

    @property
    def is_quiet(self) -> bool:
        """Whether no round is prepared here: none before `start`, after the last, or until `go_on`."""
        return self._thread is None or self._holds or self._has_ended

    def is_due(self) -> bool:
        """Whether this island's inner steps for the round, and since it gave the fragment last, are done."""
        return self._team.on_leader(self._is_due)

    def heard(self, tokens: int) -> list[Heard]:
        """What was committed while this island trained, by now on `tokens` tokens since it gave.

        Local params go on from it. Raises CaughtUp, having begun to listen anew, or what else has ended the thread.
        """
        return self._landed(lambda: self._num_heard, max(self._side.unsent.weights) + tokens)

    def give(self, tokens: int, *, holds: bool = False) -> Heard:
        """Give the progress made on `tokens` tokens to the round that has not landed yet; the round, committed.

        With this progress or without it: the plan may have been fixed. `holds`: if with it, no round is prepared then
        until `go_on` is called. Raises as `heard`.
        """
        started, wanted = time.monotonic(), self._num_landed + 1
        snapshot = self._side.unsent.snapshot(self.position.round, tokens)
        self._holds = holds
        self._offer.put(snapshot)
        if self._team.is_leader:
            self._side.loop.run(self._averaging.offered(self._offer))
        (heard,) = self._landed(lambda: self._wait_for(wanted), snapshot.weight, snapshot)
        waited = time.monotonic() - started
        return replace(heard, landing=Landing(heard.landing.reports, waited))

    def go_on(self) -> None:
        """Rounds are prepared again after one that this island gave to."""
        with self._changed:
            self._holds = False
            self._changed.notify_all()

    # -- on the thread that trains ----------------------------------------------------------------------------

    def _begin_from(self, position: Position) -> None:
        self.position = position
        """After the last round that has landed; the same on every rank."""
        self._offer = Offer()
        self._heard: deque[Heard] = deque()
        """Committed, and not landed yet."""
        self._num_heard = self._num_landed = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._has_ended = self._holds = False

    def _is_due(self) -> bool:
        pace, schedule, number = self._side.pace, self._schedule, self.position.round
        since_any = pace.num_steps - self._gave_at
        since_fragment = pace.num_steps - self._fragment_given_at[number % schedule.fragments]
        # Without the second an island that gives to every n-th round could give the same fragment each time.
        return since_any >= pace.of(schedule.steps(number)) and since_fragment >= pace.of(schedule.inner_steps)

    def _landed(self, count: Callable[[], int], weight: int, given: Snapshot | None = None) -> list[Heard]:
        """Rounds up to the leader's `count` land, on every rank. `weight`: tokens of what has not been sent."""
        try:
            heard = self._committed(count)
        except BehindError as behind:
            caught = self._catch_up(behind, weight)
            if not caught.is_kept:
                self.begin_progress()
            self.start()
            raise caught from None
        landed = [self._settle(one, given) for one in heard]
        # Once for each fragment; its number is a round, too, that sends it.
        for fragment, is_given in {one.fragment: one.is_given for one in landed}.items():
            if is_given:
                self._side.held.take_over(fragment)
            else:
                self._side.held.carry_over(fragment)
        if any(one.is_dropped for one in landed):
            self._side.held.take_over()
        return landed

    def _committed(self, count: Callable[[], int]) -> list[Heard]:
        number, has_ended = self._team.on_leader(lambda: (count(), self._has_ended))
        # Other ranks commit a moment later than the leader, or end as it does.
        self._wait_for(number)
        heard = [self._heard.popleft() for _ in range(number - self._num_landed)]
        self._num_landed = number
        if not heard and has_ended:
            self._raise_error()
        return heard

    def _settle(self, heard: Heard, given: Snapshot | None) -> Heard:
        """What has not been sent, after a round that has landed; local params follow."""
        unsent, self.position = self._side.unsent, heard.position
        if heard.is_given:
            assert given is not None, "an island that gives waits for the round"
            unsent.landed(given, heard.position)
            self._gave_at = self._fragment_given_at[heard.fragment] = self._side.pace.num_steps
        elif not unsent.reading.go_on(heard.position.account):
            unsent.drop(heard.position)
            self.begin_progress()
            return replace(heard, is_dropped=True)
        return heard

    def _wait_for(self, count: int) -> int:
        """How many rounds were heard, when there are `count` or no more will come: at most `count`.

        As long as the round takes: what bounds that is in the agreement and the reduce.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._num_heard >= count or self._has_ended)
            return min(self._num_heard, count)

    def _raise_error(self) -> None:
        assert self._thread is not None, "it has been started"
        self._thread.join()
        if self._error is not None:
            raise self._error

    # -- the thread of the rounds -----------------------------------------------------------------------------

    def _run(self) -> None:
        held, me = self._side.held, self._side.identity.island
        try:
            while not self._is_last(held.mine.position):
                fragment = held.space.fragment_of(held.mine.position.round)
                reports = self._averaging.attend(self._offer)
                is_given = me not in reports[-1].listeners
                self._note(Heard(Landing(reports, 0.0), fragment, held.mine.position, is_given))
                if is_given:
                    self._wait_to_go_on()
        except BaseException as error:  # noqa: BLE001 - raised again on the thread that can handle it
            self._error = error
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _note(self, heard: Heard) -> None:
        with self._changed:
            self._heard.append(heard)
            self._num_heard += 1
            self._changed.notify_all()

    def _wait_to_go_on(self) -> None:
        """As long as the thread that trains takes to save."""
        with self._changed:
            self._changed.wait_for(lambda: not self._holds)

    def _is_last(self, position: Position) -> bool:
        return self._total_tokens is not None and position.tokens >= self._total_tokens
