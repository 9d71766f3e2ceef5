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
from outer.fragments import Schedule
from outer.island_state import Snapshot
from outer.offer import Offer
from outer.reports import Landing
from outer.state import Position


@dataclass(frozen=True)
class Heard:
    """A round that is committed here."""

    landing: Landing
    fragment: int
    position: Position
    """After it."""
    is_given: bool
    """Whether this island's progress is in it."""


class Listening:
    """Of one rank. Every rank of the island builds it and makes the same calls in the same order."""

    def __init__(self, averaging: Averaging, side: Side, schedule: Schedule, total_tokens: int | None) -> None:
        self._averaging, self._side, self._team, self._schedule = averaging, side, side.team, schedule
        self._total_tokens = total_tokens
        self._begin_from(side.held.mine.position)
        self.drop_progress()

    def start(self) -> None:
        """Listen from now on, from the state that this island holds."""
        self._begin_from(self._side.held.mine.position)
        name = f"{threading.current_thread().name} rounds"
        # A daemon: a process that is told to stop does not wait for the others of its last round.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def drop_progress(self) -> None:
        """This island's progress is given up: what it gives next begins now."""
        made, schedule = self._side.pace.num_steps, self._schedule
        self._gave_at = made
        # As if each fragment had been given in its turn before.
        self._fragment_given_at = [made + schedule.end(f) - schedule.inner_steps for f in range(schedule.fragments)]

    @property
    def is_over(self) -> bool:
        """Whether the run's tokens are committed."""
        return self._is_last(self.position)

    def is_due(self) -> bool:
        """Whether this island's inner steps for the round, and since it gave the fragment last, are done."""
        return self._team.on_leader(self._is_due)

    def land(self) -> list[Heard]:
        """What was committed since the last call; local params go on from it. Raises what has ended the thread."""
        return self._land(lambda: self._num_heard)

    def give(self, snapshot: Snapshot) -> Heard:
        """Give to the round that has not landed yet; `land` it when it is committed, with this or without it."""
        started, wanted = time.monotonic(), self._num_landed + 1
        self._offer.put(snapshot)
        if self._team.is_leader:
            self._side.loop.run(self._averaging.offered(self._offer))
        (heard,) = self._land(lambda: self._wait_for(wanted))
        if heard.is_given:
            self._gave_at = self._fragment_given_at[heard.fragment] = self._side.pace.num_steps
        waited = time.monotonic() - started
        return replace(heard, landing=Landing(heard.landing.reports, waited))

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
        self._has_ended = False

    def _is_due(self) -> bool:
        pace, schedule, number = self._side.pace, self._schedule, self.position.round
        since_any = pace.num_steps - self._gave_at
        since_fragment = pace.num_steps - self._fragment_given_at[number % schedule.fragments]
        # Without the second an island that gives to every n-th round could give the same fragment each time.
        return since_any >= pace.of(schedule.steps(number)) and since_fragment >= pace.of(schedule.inner_steps)

    def _land(self, count: Callable[[], int]) -> list[Heard]:
        """Rounds up to the leader's `count` land, on every rank."""
        number, has_ended = self._team.on_leader(lambda: (count(), self._has_ended))
        # Other ranks commit a moment later than the leader, or end as it does.
        self._wait_for(number)
        heard = [self._heard.popleft() for _ in range(number - self._num_landed)]
        self._num_landed = number
        for fragment, is_given in {h.fragment: h.is_given for h in heard}.items():
            if is_given:
                self._side.held.take_over(fragment)
            else:
                self._side.held.carry_over(fragment)
        if heard:
            self.position = heard[-1].position
        elif has_ended:
            self._raise_error()
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

    def _is_last(self, position: Position) -> bool:
        return self._total_tokens is not None and position.tokens >= self._total_tokens
