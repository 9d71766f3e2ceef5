"""One life of a virtual island: enter the run -> (inner steps -> round) x rounds -> leave, as in
diloco/island.py.

Its rounds are those of real islands (`IslandRounds`); only inner steps are modelled: they take time
on a virtual clock.
"""

import logging
from dataclasses import dataclass, field
from hashlib import sha256

from diloco.island_rounds.of_all import IslandRounds
from diloco.runtime.progress import Progress
from diloco.virtual.event_loop import VirtualEventLoop
from diloco.virtual.stand_in import StandIn, StandInParams
from diloco.virtual.world import Machine
from outer.agreement.running.peers import Identity
from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.hooks import NoHooks, Phase
from outer.identity.island_key import IslandKey
from outer.leases.ledger import Ledger
from outer.loop import OuterLoop, build_loop
from outer.report import CaughtUp, Landing, LoopSettings
from outer.space.ranks import RankGroup
from outer.transports.loopback import Hub

log = logging.getLogger(__name__)

RUN = "virtual"


@dataclass(frozen=True)
class Seat:
    """Properties of an island in a virtual run that do not change when its processes are
    restarted.
    """

    name: str
    index: int
    step_seconds: float
    host_seconds: float
    """Time of the island's own work in a round, between its reduce and its vote."""
    link_kbit: int
    """Rate of the island's link, as it announces it to other islands; 0 if it is not limited."""
    stand_in: StandIn
    hub: Hub
    tokens_per_step: int
    config_hash: str
    seed: int


@dataclass
class LandedRound:
    """A committed round that an island took part in, with times in virtual seconds."""

    number: int
    num_steps: int
    """Number of this island's inner steps that the commit contains."""
    num_attempts: int
    ready_at: float
    planned_at: float
    reduced_at: float
    voted_at: float
    committed_at: float
    landed_at: float
    digest: str
    """Digest of the state that the commit led to."""


@dataclass
class Diary:
    """Record of one process of an island."""

    begun_at: float
    entered_at: float | None = None
    """Time at which the process had entered the run, with a state if it needed one."""
    ended_at: float | None = None
    error: str = ""
    rounds: list[LandedRound] = field(default_factory=list)
    num_steps: int = 0
    """Number of inner steps made."""
    num_caught_up: int = 0
    round: int = -1
    """Number of the round for which inner steps are made."""


class PhaseTimes(NoHooks):
    """Hooks that record when the island came to each phase of each round: the first time for
    "plan", the last for others.

    They also let virtual time pass for the island's own work, because the real work takes no
    virtual time.
    """

    def __init__(self, loop: VirtualEventLoop, host_seconds: float) -> None:
        self._loop = loop
        self._host_seconds = host_seconds
        self.times: dict[tuple[int, Phase], float] = {}

    def reached(self, phase: Phase, round_number: int) -> None:
        if phase != "plan" or (round_number, phase) not in self.times:
            self.times[round_number, phase] = self._loop.time()
        if phase == "vote" and self._host_seconds:
            self._loop.sleep(
                self._host_seconds
            )  # The reduce is complete, and this runs in the thread of the round.

    def describe(self, number: int, progress: Progress, landing: Landing) -> LandedRound:
        """Describe a round that has landed now. `progress`: the island's own in this round."""
        times = self.times
        return LandedRound(
            number=number,
            num_steps=progress.steps,
            num_attempts=len(landing.reports),
            ready_at=times[number, "plan"],
            planned_at=times[number, "send"],
            reduced_at=times[number, "vote"],
            voted_at=times[number, "decide"],
            committed_at=times[number, "apply"],
            landed_at=self._loop.time(),
            digest=landing.reports[-1].digest,
        )


class DiaryEvents:
    """The RoundEvents of a virtual island: it notes its rounds in the diary, and has no state to
    save.
    """

    def __init__(self, diary: Diary, outer: OuterLoop, phases: PhaseTimes) -> None:
        self._diary = diary
        self._outer = outer
        self._phases = phases

    def begins(self, inner_step: int, ledger: Ledger) -> None:
        self._diary.round = self._outer.round

    def launches(self, progress: Progress) -> None:
        pass

    def waits(self) -> None:
        pass

    def landed(self, number: int, progress: Progress, landing: Landing) -> None:
        self._diary.rounds.append(self._phases.describe(number, progress, landing))

    def caught_up(self, caught: CaughtUp, progress: Progress) -> None:
        self._diary.num_caught_up += 1

    def may_save(self, *, is_asked: bool) -> None:
        pass

    def why_stop(self, num_rounds: int) -> str:
        return ""


class VirtualIsland:
    """One process of an island. It starts to run when it is created, on its own machine."""

    def __init__(
        self, seat: Seat, machine: Machine, *, incarnation: int, joins: bool, start_after: float
    ) -> None:
        """Create the process. It starts after `start_after` virtual seconds. `incarnation`: number
        of earlier processes.
        """
        self.seat = seat
        self.machine = machine
        self._joins = joins
        self._start_after = start_after
        self.slowness = 1.0
        """Factor by which its inner steps are slower."""
        self.was_killed = False
        """Whether a fault has ended the process."""
        self.diary = Diary(begun_at=machine.world.now)
        self._incarnation = sha256(f"{seat.name} {incarnation}".encode()).hexdigest()[:16]
        self._loop = VirtualEventLoop(machine)
        self._phases = PhaseTimes(self._loop, seat.host_seconds)
        self._loop.spawn(self._live, seat.name)

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, for whatever reason."""
        return self.machine.is_dead or self.diary.ended_at is not None

    @property
    def is_down(self) -> bool:
        """Whether the process takes no part at present: it has ended, is frozen, or has not entered
        the run yet.
        """
        machine = self.machine
        return (
            self.is_over
            or machine.frozen_until > machine.world.now
            or self.diary.entered_at is None
        )

    def close(self) -> None:
        """Free the threads and the event loop. Must be called after the simulation."""
        self._loop.close()

    def _live(self) -> None:
        try:
            self._train()
        except Exception as error:  # noqa: BLE001 - any error ends this island, and the simulation reports it
            log.warning("%s has failed: %s", self.seat.name, error)
            self.diary.error = f"{type(error).__name__}: {error}"
        self.diary.ended_at = self._loop.time()

    def _train(self) -> None:
        self._loop.sleep(self._start_after)
        params = StandInParams(self.seat.stand_in.specs, self.seat.index)
        outer = self._open(params)
        outer.begin()
        self.diary.entered_at = self._loop.time()
        rounds = IslandRounds(
            outer,
            self.seat.stand_in.config.num_rounds,
            DiaryEvents(self.diary, outer, self._phases),
        )
        rounds.proceed()
        while not rounds.is_over:
            self._inner_step(outer, params)
            rounds.step(self.seat.tokens_per_step)
        outer.finish()

    def _inner_step(self, outer: OuterLoop, params: StandInParams) -> None:
        outer.cursor.next_unit()
        seconds = self.seat.step_seconds * self.slowness
        self._loop.sleep(seconds)
        params.train()
        outer.pace.observe_step(seconds)
        self.diary.num_steps += 1

    def _open(self, params: StandInParams) -> OuterLoop:
        seat = self.seat
        key = IslandKey(sha256(f"{seat.seed} {seat.name}".encode()).digest())
        settings = NetworkSettings(
            RUN, seat.name, 0, hub=seat.hub, island_key=key, connect_seconds=60.0
        )
        network = self._loop.run(open_network("loopback", settings))
        identity = Identity(seat.name, self._incarnation, key.public, seat.config_hash)
        own = LoopSettings(
            max_tokens=2 * seat.stand_in.config.inner_steps * seat.tokens_per_step,
            joins=self._joins,
            index=seat.index,
            seed=seat.seed,
            link_kbit=seat.link_kbit,
            hooks=self._phases,
            now=self._loop.time,
        )
        return build_loop(
            seat.stand_in.config, identity, params, RankGroup(), network, self._loop, own
        )
