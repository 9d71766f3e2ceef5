"""Rounds that wait only for a quorum (`outer.wait_for`), one after another in a thread of their
own.

    rounds thread     observe or contribute -> plan -> reduce -> vote -> commit -> observe ...
                      global params
    training thread   step, land, step, land, ... contribute, wait, land, step ...
                      local params

An island that is still training observes: it commits the other islands' rounds while it computes
inner steps. Between two steps these rounds land: local params continue from the new global params
and keep their progress. When its inner steps are done the island contributes, and waits for that
round. If the plan was fixed earlier, it contributes to the next one.

After some rounds no further round is prepared on this island until the training thread has landed
them and calls `go_on`, so that it can save the state in between: after rounds that all islands
save, and after its own contributions with `holds`.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from outer.errors import BehindError
from outer.report import CaughtUp, Landing, RoundReport
from outer.rounds.agreed import AgreedAverager
from outer.space.fragments import FragmentSchedule
from outer.state.earlier import EarlierState
from outer.state.part_state import Position
from outer.state.pending import PendingProgress
from outer.state.pseudo_gradient import Contribution, Snapshot
from outer.threads import Joinable, Worker


@dataclass(frozen=True)
class CommittedRound:
    """A round that is committed on this island."""

    landing: Landing
    fragment: int
    position: Position
    """Position after the round."""
    is_given: bool
    """Whether the round contains this island's progress."""
    is_held: bool = False
    """Whether no further round is prepared on this island until `go_on`."""
    is_dropped: bool = False
    """Whether this island's progress was dropped, because its data are leased to it no longer or
    the round went back to an earlier state."""

    @property
    def earlier(self) -> int | None:
        """Number of the round to whose state this round went back; None if it averaged."""
        return self.landing.reports[-1].earlier


class QuorumRounds:
    """The rounds of one rank. Every rank of the island makes the same calls in the same order,
    from the training thread.
    """

    def __init__(
        self,
        averager: AgreedAverager,
        pending: PendingProgress,
        schedule: FragmentSchedule,
        is_last: Callable[[Position], bool],
        catch_up: Callable[[BehindError, int], CaughtUp | None],
        worker: Worker,
        is_save_due: Callable[[Position, Position], bool],
    ) -> None:
        """Create the rounds. `catch_up` takes the surviving state, given the tokens of this
        island's progress; it returns None if this island has that state. `is_save_due`: whether the
        state is to be saved after a commit that led from one position to the other.
        """
        self._averager = averager
        self._pending = pending
        self._schedule = schedule
        self._replica = averager.runner.replica
        self._pace = averager.runner.pace
        self._is_last = is_last
        self._catch_up = catch_up
        self._worker = worker
        self._is_save_due = is_save_due
        self._reset(self._replica.position)
        self.begin_progress()

    def start(self) -> None:
        """Take part in rounds from now on, beginning with the state that the replica holds."""
        self._reset(self._replica.position)
        self._start_rounds()

    def begin_progress(self, num_steps: int = 0) -> None:
        """Record that the progress to be contributed next began `num_steps` inner steps ago."""
        made = self._pace.num_steps - num_steps
        schedule = self._schedule
        self._gave_at = made
        # Each fragment is treated as if it had been contributed in its turn before.
        self._fragment_given_at = [
            made + schedule.end(f) - schedule.inner_steps for f in range(schedule.fragments)
        ]

    @property
    def is_over(self) -> bool:
        """Whether all tokens of the run are committed."""
        return self._is_last(self.position)

    @property
    def is_quiet(self) -> bool:
        """Whether no round is being prepared on this island: before `start`, after the last
        round, or until `go_on`.
        """
        return self._work is None or self._num_held > self._num_released or self._has_ended

    def is_due(self) -> bool:
        """Return whether enough inner steps are done to contribute, both for the round and for
        its fragment.
        """
        return self._replica.ranks.on_leader(self._is_due)

    def land(self, tokens: int) -> list[CommittedRound]:
        """Land the rounds that were committed while this island trained, and return them. Local
        params continue from them.

        `tokens`: tokens trained on since the last contribution. Raises CaughtUp after a new
        `start`, or the error that ended the rounds thread.
        """
        return self._land(lambda: self._num_committed, max(self._pending.weights) + tokens)

    def contribute(self, tokens: int, *, holds: bool = False) -> CommittedRound:
        """Contribute progress made on `tokens` tokens to the next round, wait for its commit and
        return it.

        The committed round may lack this progress, if its plan had been fixed earlier. With `holds`
        no further round is prepared after one that contains the progress, until `go_on` is called.
        Raises like `land`.
        """
        now = self._averager.event_loop.time
        started = now()
        wanted = self._num_landed + 1
        snapshot = self._pending.snapshot(self.position.round, tokens)
        self._holds = holds
        self._contribution.put(snapshot)
        self._averager.runner.contribute(self._contribution)
        (committed,) = self._land(lambda: self._wait_for(wanted), snapshot.weight, snapshot)
        waited = now() - started
        return replace(committed, landing=Landing(committed.landing.reports, waited))

    def go_on(self) -> None:
        """Prepare rounds again after a round that was held and has landed."""
        with self._changed:
            self._holds = False
            self._num_released = self._num_held
            self._changed.notify_all()

    def offer(self, earlier: EarlierState) -> None:
        """Offer the others to go back to this state together, in each round until `withdraw`.

        The next contribution announces it. A round that goes back ends the offer.
        """
        self._contribution.offer(earlier)

    def withdraw(self) -> None:
        """Offer to go back no longer."""
        self._contribution.withdraw()

    # -- on the training thread --------------------------------------------------------------------

    def _reset(self, position: Position) -> None:
        self.position = position
        """Position after the last round that has landed; the same on every rank."""
        self._contribution = Contribution()
        self._committed: deque[CommittedRound] = deque()
        """Rounds that are committed and have not landed yet."""
        self._num_committed = self._num_landed = 0
        self._num_to_release = 0
        """Number of committed rounds that were held."""
        self._num_held = 0
        """The number of them that have landed: `go_on` must not release one before it has."""
        self._num_released = 0
        """The number of them after which `go_on` was called."""
        self._changed = threading.Condition()
        self._work: Joinable | None = None
        """The thread of the rounds; None before `start`."""
        self._error: BaseException | None = None
        self._has_ended = False
        self._holds = False
        """Whether the round with the next contribution is held."""

    def _start_rounds(self) -> None:
        self._error = None
        self._has_ended = False
        self._work = self._worker.start(self._run)

    def _is_due(self) -> bool:
        pace = self._pace
        schedule = self._schedule
        number = self.position.round
        since_any = pace.num_steps - self._gave_at
        since_fragment = pace.num_steps - self._fragment_given_at[number % schedule.fragments]
        # Without the second condition an island that contributes to every n-th round could always
        # send the same fragment.
        return since_any >= pace.of(schedule.steps(number)) and since_fragment >= pace.of(
            schedule.inner_steps
        )

    def _land(
        self, count: Callable[[], int], weight: int, given: Snapshot | None = None
    ) -> list[CommittedRound]:
        """Land rounds up to the leader's `count` on every rank, and return them. `weight`:
        tokens that have not been sent.
        """
        committed = self._take_committed(count, weight)
        landed = [self._settle(one, given) for one in committed]
        # Only once per fragment; a fragment's number is also the number of a round that sends it.
        for fragment, is_given in {one.fragment: one.is_given for one in landed}.items():
            if is_given:
                self._replica.take_over(fragment)
            else:
                self._replica.carry_over(fragment)
        if any(one.is_dropped or one.earlier is not None for one in landed):
            self._replica.take_over()
        return landed

    def _take_committed(self, count: Callable[[], int], weight: int) -> list[CommittedRound]:
        while True:
            number, has_ended = self._replica.ranks.on_leader(lambda: (count(), self._has_ended))
            # Other ranks commit slightly later than the leader, or end as the leader does.
            self._wait_for(number)
            committed = [self._committed.popleft() for _ in range(number - self._num_landed)]
            self._num_landed = number
            if committed or not has_ended:
                return committed
            try:
                self._raise_error()
                return committed
            except BehindError as behind:
                self._recover(behind, weight)

    def _recover(self, behind: BehindError, weight: int) -> None:
        """Take the surviving state and raise CaughtUp. If it is this island's own, prepare
        rounds again.
        """
        caught = self._catch_up(behind, weight)
        if caught is None:
            self._start_rounds()
            return
        if not caught.is_kept:
            self.begin_progress()
        self.start()
        raise caught from None

    def _settle(self, committed: CommittedRound, given: Snapshot | None) -> CommittedRound:
        """Update the pending progress after a round; local params follow in `_land`."""
        pending = self._pending
        self.position = committed.position
        self._num_held += committed.is_held
        if committed.earlier is not None:
            pending.give_up(given if committed.is_given else None, self.position)
            self.begin_progress()
            return replace(committed, is_dropped=not committed.is_given)
        if committed.is_given:
            assert given is not None, "an island that contributes waits for the round"
            pending.settle(given, self.position)
            self._gave_at = self._fragment_given_at[committed.fragment] = self._pace.num_steps
        elif not pending.cursor.keep(committed.position.ledger):
            pending.drop(self.position)
            self.begin_progress()
            return replace(committed, is_dropped=True)
        return committed

    def _wait_for(self, count: int) -> int:
        """Wait until `count` rounds are committed or no more will be. Return the number committed,
        at most `count`.

        The deadlines of the round protocol and of the reduce limit the wait.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._num_committed >= count or self._has_ended)
            return min(self._num_committed, count)

    def _raise_error(self) -> None:
        assert self._work is not None, "it has been started"
        self._work.join()
        if self._error is not None:
            raise self._error

    # -- on the rounds thread ----------------------------------------------------------------------

    def _run(self) -> None:
        replica = self._replica
        try:
            while not self._is_last(replica.position):
                before = replica.position
                reports = self._averager.run(self._contribution)
                self._add(self._describe(reports, before))
                self._wait_to_go_on()
        except BaseException as error:  # noqa: BLE001 - raised again on the thread that can handle it
            self._error = error
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _describe(self, reports: list[RoundReport], before: Position) -> CommittedRound:
        """Return the round that these attempts have just committed."""
        position = self._replica.position
        fragment = self._replica.space.fragment_of(before.round)
        is_given = self._averager.runner.island not in reports[-1].listeners
        is_due = not self._is_last(position) and self._is_save_due(before, position)
        is_held = is_due or (is_given and self._holds)
        if reports[-1].earlier is not None:
            # Here and not on the training thread, so that the next plan does not go back again.
            self._contribution.withdraw()
        return CommittedRound(Landing(reports, 0.0), fragment, position, is_given, is_held)

    def _add(self, committed: CommittedRound) -> None:
        with self._changed:
            self._committed.append(committed)
            self._num_committed += 1
            self._num_to_release += committed.is_held
            self._changed.notify_all()

    def _wait_to_go_on(self) -> None:
        """Wait until the training thread has called `go_on` for each round that was held."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_released >= self._num_to_release)
