"""Does random faults to running islands from outside, and watches what each of them costs
(outside.py).
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import ceil
from pathlib import Path

from diloco.network_emulation.namespaces import Namespace, Net, open_net
from diloco.records.metrics import EventRecord, RoundRecord
from diloco.records.run_folder import METRICS, Tail
from diloco.runtime.operator_requests import STOP
from inner.files import write_atomically
from tests.faults import shortages
from tests.faults.bootstraps import Bootstrap, bootstrap
from tests.faults.forked import OVERRIDES, POLL_SECONDS, train_at_pace
from tests.faults.launched import LaunchedIsland, ended, launch, send
from tests.faults.leftovers import descendants_of
from tests.faults.outside import (
    SHORTAGES,
    WAIT_SECONDS,
    Outcome,
    OutsideFault,
    OutsideSettings,
    Strike,
    account,
    draw_faults,
    least_bound,
)
from tests.swarm import Swarm, swarm

INNER_STEPS, STEP_SECONDS = 6, 0.1
CALM_ROUNDS = 2
GUARD_SECONDS = 900.0
"""How long the run may take to begin, to go on to the next fault, and to end, also where other work
has the machine. A hang is found long before: after T without a commit.
"""
AFTERMATH_SECONDS = 10.0
"""For so long after a shortage a restart of the island counts as its consequence."""
JOINED = re.compile(r"round (\d+), \d+ tokens, digest ([0-9a-f]+)")
"""The event of an island that has taken a state."""
DIGEST_SHOWN = 12
LOOK_SECONDS = 0.5
"""Interval between looks at the islands' logs."""
KILLS = ("kill", "rank", "daemon", "terminate", *SHORTAGES)
"""Faults in which a process of the island may end between a commit and its record."""


def run_outside_faults(settings: OutsideSettings, folder: Path) -> Outcome:
    """Run islands under these faults until all of them train together again, and stop them."""
    started = time.monotonic()
    with open_runner(settings, folder) as runner:
        outcome = runner.outcome
        try:
            runner.run(draw_faults(settings))
        except AssertionError as error:
            outcome.failures.append(str(error))
        num_unrecorded = sum(strike.kind in KILLS for strike in outcome.strikes)
        full_disks = [strike for strike in outcome.strikes if strike.kind == "disk"]
        num_unrecorded += sum(count_rounds(seconds_of(strike)) for strike in full_disks)
        # Before the islands' disks are gone.
        outcome.account = account(runner.run_dir, INNER_STEPS, num_unrecorded)
    outcome.seconds = time.monotonic() - started
    return outcome


def count_rounds(seconds: float) -> int:
    """The most rounds that can be made in so many seconds, and the one under way."""
    return ceil(seconds / (INNER_STEPS * STEP_SECONDS)) + 1


def seconds_of(strike: Strike) -> float:
    """How long the fault has lasted, which is longer than it was meant to where the machine is
    busy.
    """
    ended_at = time.time() if strike.ended_at is None else strike.ended_at
    return ended_at - strike.at


@contextmanager
def open_runner(settings: OutsideSettings, folder: Path) -> Iterator["OutsideRunner"]:
    """Start a bootstrap process and all islands. Kills all of them at exit."""
    if settings.transport == "hivemind":
        import hivemind  # noqa: F401 - the forked islands inherit it
    overrides = [
        f"outer.transport={settings.transport}",
        *OVERRIDES,
        f"outer.inner_steps={INNER_STEPS}",
    ]
    overrides += [f"outer.wait_seconds={WAIT_SECONDS}", "island.checkpoint.every_rounds=5"]
    with ExitStack() as opened:
        net = opened.enter_context(open_net()) if settings.is_apart else None
        places = [net.add() for _ in range(len(settings.islands) + 1)] if net else []
        own = [
            {**i, "listen_host": place.host}
            for i, place in zip(settings.islands, places, strict=False)
        ]
        where = (places[-1].host, places[-1].command()) if places else ("127.0.0.1", [])
        served = opened.enter_context(bootstrap(settings.transport, folder / "bootstrap", *where))
        islands = own or list(settings.islands)
        made = opened.enter_context(
            swarm(folder, *overrides, islands=islands, address=served.address)
        )
        made.inside = {i: place.name for i, place in enumerate(places[:-1])}
        made.has_own_shared_memory = settings.is_apart
        runner = OutsideRunner(made, served, net, places)
        for folder in runner.folders if settings.is_apart else ():
            opened.enter_context(shortages.own_disk(folder))
        opened.enter_context(ended(runner.islands))
        for index in range(len(islands)):
            runner.start(index)
        yield runner


class OutsideRunner:
    """The islands, the faults that are not over, and what has been seen."""

    def __init__(
        self, made: Swarm, served: Bootstrap, net: Net | None, places: list[Namespace]
    ) -> None:
        self.run_dir = made.folder / made.config.name
        self.islands: dict[int, LaunchedIsland] = {}
        self.outcome = Outcome()
        self._made, self._bootstrap, self._net, self._places = made, served, net, places
        self._tails: dict[int, Tail] = {}
        self._commits: dict[int, list[RoundRecord]] = {}
        self._holds: dict[int, tuple[int, str]] = {}
        """Rounds behind the state that each island holds, however it got it, and the beginning of
        its digest.
        """
        self._ends: list[tuple[float, Strike, Callable[[], bool]]] = []
        """Until when a fault lasts (monotonic), the fault, and a function that ends it and says
        whether it is over.
        """
        self._down: set[int] = set()
        """Islands whose launcher was killed or asked to leave and is not started again yet."""
        self._is_bootstrap_starting = False
        self._num_restarts: dict[int, int] = {}
        self._look_at = 0.0

    def start(self, index: int) -> None:
        island = self.islands[index] = launch(self._made, index, train_at_pace(STEP_SECONDS))
        self._down.discard(index)
        self._tails.setdefault(index, Tail(island.folder / METRICS))
        self._commits.setdefault(index, [])

    def run(self, faults: Iterator[OutsideFault]) -> None:
        """Let the faults strike, wait until all islands train together again, and stop them."""
        self._until(lambda: all(len(c) >= 4 for c in self._commits.values()), "the first rounds")
        last = time.monotonic()
        for fault in faults:
            due = last + fault.pause
            self._until(
                lambda f=fault, due=due: time.monotonic() >= due and self._may_strike(f),
                f"a time for {fault}",
            )
            self._strike(fault)
            last = time.monotonic()
        self._until(lambda: not self._struck and not self._ends, "the return of all islands")
        self._until(
            lambda: all(s.second_commit for s in self.outcome.strikes),
            "commits after the last fault",
        )
        self._until(self._is_calm, "rounds of all islands")
        self._stop()

    # -- striking ----------------------------------------------------------------------------------

    @property
    def _struck(self) -> dict[int, Strike]:
        """The islands that a fault has hit and that are in no committed round since, with their
        faults.
        """
        return {
            s.island: s for s in self.outcome.strikes if s.back is None and s.kind != "bootstrap"
        }

    def _may_strike(self, fault: OutsideFault) -> bool:
        """Whether the target is well, at least half of the islands stay well, and all have
        committed since the last.
        """
        if any(strike.first_commit is None for strike in self.outcome.strikes):
            return False
        if fault.kind == "bootstrap":
            return not any(
                strike.kind == "bootstrap" and strike.back is None
                for strike in self.outcome.strikes
            )
        return fault.island not in self._struck and len(self._struck) + 1 <= len(self.islands) // 2

    def _strike(self, fault: OutsideFault) -> None:
        spared = fault.kind == "bootstrap"
        healthy = tuple(
            i for i in self.islands if i not in self._struck and (spared or i != fault.island)
        )
        bound = least_bound([self._commits[i] for i in healthy])
        strike = Strike(fault.kind, fault.island, time.time(), fault.seconds, bound, healthy)
        end = self._act(fault, strike)
        seconds = 0.0 if fault.kind in ("rank", "daemon") else fault.seconds
        self._ends.append((time.monotonic() + seconds, strike, end))
        self.outcome.strikes.append(strike)

    def _act(self, fault: OutsideFault, strike: Strike) -> Callable[[], bool]:
        """Do what the fault says. Returns a function that ends it and says whether it is over."""
        island, index = self.islands[fault.island], fault.island
        ranks = island.ranks
        if fault.kind in ("rank", "daemon"):
            for pid in [fault.choose(ranks)] if fault.kind == "rank" else island.daemons:
                send(pid, signal.SIGKILL)
            return lambda: len(island.ranks) == len(ranks) and not set(ranks) & set(island.ranks)
        if fault.kind in ("kill", "terminate"):
            self._down.add(index)
            island.kill() if fault.kind == "kill" else send(island.launcher.pid, signal.SIGTERM)
            return lambda: self._start_again(index)
        if fault.kind == "freeze":
            island.signal_all(signal.SIGSTOP)
            return lambda: done(lambda: island.signal_all(signal.SIGCONT))
        if fault.kind == "freeze one":
            pid = fault.choose([*ranks, *island.daemons])
            send(pid, signal.SIGSTOP)
            return lambda: done(lambda: send(pid, signal.SIGCONT))
        if fault.kind == "bootstrap":
            self._bootstrap.kill()
            return partial(self._restart_bootstrap, strike)
        net, some = self._net, [self._places[index]]
        if fault.kind in SHORTAGES:
            end = self._begin_shortage(fault.kind, island)
            return lambda: done(end)
        assert fault.kind == "cut" and net is not None, f"{fault.kind} needs namespaces"
        others = [place for place in self._places if place not in some]
        net.cut(some, others)
        return lambda: done(lambda: net.heal(some, others))

    def _begin_shortage(self, kind: str, island: LaunchedIsland) -> Callable[[], None]:
        """Begin a shortage of an island. Returns a function that ends it."""
        processes = [*island.ranks, *island.daemons]
        if kind == "disk":
            return shortages.room(island.folder)
        if kind == "shared memory":
            return shortages.room(Path(f"/proc/{island.launcher.pid}/root/dev/shm"))
        if kind == "threads":
            group = f"diloco-{os.getpid()}-{len(self.outcome.strikes)}"
            return shortages.threads(
                [island.launcher.pid, *descendants_of(island.launcher.pid)], group
            )
        return {"memory": shortages.memory, "files": shortages.files}[kind](processes)

    @property
    def folders(self) -> list[Path]:
        """The islands' own folders."""
        config = self._made.config
        return [
            config.for_island(index).folder(config.name) for index in range(len(config.islands))
        ]

    def _start_again(self, index: int) -> bool:
        if self.islands[index].exit_code is None:  # It is still leaving.
            return False
        self.start(index)
        return True

    def _restart_bootstrap(self, strike: Strike) -> bool:
        """Start the bootstrap process at the first call. Other faults end while it starts."""
        if not self._is_bootstrap_starting:
            self._bootstrap.begin_restart()
            self._is_bootstrap_starting = True
        if not self._bootstrap.is_back():
            return False
        self._is_bootstrap_starting = False
        strike.back = 0.0
        return True

    # -- watching ----------------------------------------------------------------------------------

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + GUARD_SECONDS
        while not is_so():
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"--- island-{i}\n{island.log[-3000:]}" for i, island in self.islands.items()
                )
                raise AssertionError(
                    f"{what} did not come in {GUARD_SECONDS:.0f} s; struck: {self._struck}\n{logs}"
                )
            self._poll()
            time.sleep(POLL_SECONDS)

    def _poll(self) -> None:
        """End faults that are due, and read what the islands have written."""
        for each in [each for each in self._ends if each[0] <= time.monotonic()]:
            _, strike, end = each
            if end():
                self._ends.remove(each)
                strike.ended_at = time.time()
        for index, tail in self._tails.items():
            for record in tail.new_records():
                if isinstance(record, RoundRecord) and record.committed:
                    self._commits[index].append(record)
                    self._holds[index] = record.round + 1, record.digest[:DIGEST_SHOWN]
                    self._see(index, record)
                elif isinstance(record, EventRecord) and (joined := JOINED.match(record.text)):
                    self._holds[index] = int(joined[1]), joined[2]
        self._see_hangs()
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            self._see_exits()

    def _see(self, index: int, record: RoundRecord) -> None:
        """Count a commit for the fault that the island comes back from, or for the faults that it
        was spared.
        """
        if (own := self._struck.get(index)) is not None:
            if own.ended_at is not None and record.time > own.ended_at:
                own.back = record.time - own.ended_at
            return
        for strike in self.outcome.strikes:
            seconds = record.time - strike.at
            if index not in strike.healthy or seconds <= 0:
                continue
            if strike.first_commit is None:
                strike.first_commit, strike.first_round = seconds, record.round
            elif strike.second_commit is None and record.round != strike.first_round:
                strike.second_commit = seconds

    def _see_hangs(self) -> None:
        for number, strike in enumerate(self.outcome.strikes):
            waited = time.time() - strike.at
            if (
                strike.first_commit is None
                and waited > strike.bound
                and len(self.outcome.hangs) <= number
            ):
                what = f"fault {number} ({strike.kind} of island {strike.island})"
                self.outcome.hangs.append(
                    f"{what}: no commit after {waited:.0f} s; T is {strike.bound:.0f} s"
                )

    def _see_exits(self) -> None:
        for index, island in self.islands.items():
            if (code := island.exit_code) is not None and index not in self._down:
                self.outcome.exits.append(
                    f"island {index} ended with status {code}: {island.log[-1000:]}"
                )
                raise AssertionError(f"island {index} has ended")
            before, self._num_restarts[index] = (
                self._num_restarts.get(index, 0),
                island.num_restarts,
            )
            if self._num_restarts[index] > before and not self._may_restart(index):
                self.outcome.exits.append(
                    f"island {index} was started again without a fault: {island.log[-1000:]}"
                )
            self.outcome.num_restarts = sum(self._num_restarts.values())

    def _may_restart(self, index: int) -> bool:
        """Whether a fault has hit the island, or a shortage whose aftermath it may be: a process
        may die of it late.
        """
        now = time.time()
        aftermath = any(
            strike.kind in SHORTAGES
            and strike.island == index
            and now - (strike.ended_at or now) < AFTERMATH_SECONDS
            for strike in self.outcome.strikes
        )
        return aftermath or index in self._struck

    # -- the end -----------------------------------------------------------------------------------

    def _is_calm(self) -> bool:
        """Whether all islands have committed the same CALM_ROUNDS rounds, all together, after the
        last fault's end.
        """
        since = max(strike.ended_at or 0.0 for strike in self.outcome.strikes)
        together = [
            {
                r.round
                for r in commits
                if r.time > since and len(r.participants) == len(self.islands)
            }
            for commits in self._commits.values()
        ]
        return len(set.intersection(*together)) >= CALM_ROUNDS

    def _stop(self) -> None:
        """Let all islands leave after one and the same round, and compare what they hold then."""
        last = 3 + max(commits[-1].round for commits in self._commits.values())
        for index, island in self.islands.items():
            self._down.add(index)
            # An island that finds the file while it is empty leaves at once.
            write_atomically(island.folder / STOP, str(last))
        self._until(
            lambda: all(island.exit_code is not None for island in self.islands.values()), "the end"
        )
        self._poll()
        for index, island in self.islands.items():
            if island.exit_code:
                self.outcome.exits.append(
                    f"island {index} ended with status {island.exit_code}: {island.log[-1000:]}"
                )
        self.outcome.num_rounds = last
        if len(set(self._holds.values())) > 1:
            self.outcome.splits.append(f"the islands end with different states: {self._holds}")


def done(act: Callable[[], object]) -> bool:
    """Call `act` and return True."""
    act()
    return True
