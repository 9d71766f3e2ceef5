"""Honest islands that train while somebody attacks them, and what is measured of them.

Every island is a forked process that runs the shipped `train`, over a real network and with a run
key. An attacker is a process, too: another island of the same config that does something else.
"""

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from diloco import island as life
from diloco.assemble import Runtime
from diloco.config.schema import Config
from diloco.train import train
from inner.files import write_atomically
from outer.agreement.running.limits import commit_bound
from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.membership.rendezvous import serve_rendezvous
from outer.network.run_key import load_run_key
from tests.faults.bootstraps import bootstrap
from tests.faults.forked import is_up, process_tree
from tests.faults.waits import assert_one_history, last_round, reached, until
from tests.swarm import Island, Swarm, Work, swarm

NUM_HONEST = 3
MOST_ATTACKERS = 8
STEP_SECONDS = 0.1
"""Duration of an inner step, so that rounds do not come faster on a machine that is idle."""
FIRST_ROUNDS = 4
"""Rounds before an attack begins, so that waits have been measured."""
LAST_ROUNDS = 3
"""Rounds of all honest islands after an attack."""
HONEST = [f"island-{index}" for index in range(NUM_HONEST)]
BOUND_FILE = "bound.txt"
TARGETS_FILE = "targets.json"
BEGUN_FILE = "attack-{}"
MiB = 1 << 20


@dataclass(frozen=True)
class Attack:
    """Who attacks, and how. `work` is what each attacking process does instead of training; it is
    killed at the end.
    """

    name: str
    work: Work
    has_key: bool = True
    """Whether the attackers hold the run key."""
    networks: tuple[str, ...] = ("gloo", "tls", "hivemind")
    num_attackers: int = 1
    is_island: bool = False
    """Whether each attacker is an island that enters the run, and may be told to leave it. The
    others never end.
    """


NO_ATTACK = Attack("none", lambda config, index: time.sleep(3600), has_key=False, num_attackers=0)


@dataclass(frozen=True)
class Outcome:
    """What the honest islands did during and after an attack."""

    attack: str
    network: str
    has_key: bool
    seconds: float
    rounds_during: int
    rounds_after: int
    longest_wait: float
    """Longest time in which no honest island came to another round, in seconds, up to the first
    after the attack.
    """
    bound: float
    """The bound T of the honest islands when the attack began, in seconds."""
    grown: int
    """Bytes by which the peak memory of the honest process that grew most has grown."""
    daemon_grown: int
    """The same for the islands' libp2p daemons."""
    refused: int
    """Kinds of refusals, by peer, that the honest islands have recorded."""


def honest(config: Config, index: int) -> None:
    """Train at a fixed pace, and keep the bound T in a file."""

    def live(runtime: Runtime) -> None:
        deadlines, slower = runtime.outer.pace.deadlines, runtime.slow_down
        path = Path(runtime.island.run_dir) / config.name / runtime.island.label / BOUND_FILE

        def slow_down(seconds: float) -> None:
            time.sleep(max(0.0, STEP_SECONDS - seconds))
            slower(max(STEP_SECONDS, seconds))
            write_atomically(path, f"{commit_bound(deadlines, NUM_HONEST, 1):.1f}")

        runtime.slow_down = slow_down
        life.run(runtime)

    train(config, index, live)


class Scene:
    """A run of honest islands, which attacks follow one another in."""

    def __init__(self, made: Swarm, network: str) -> None:
        self._made, self._network = made, network
        self.islands = [made.start(index, honest) for index in range(NUM_HONEST)]
        self._next = NUM_HONEST
        for island in self.islands:
            reached(island, FIRST_ROUNDS)
        targets = asyncio.run(_find_targets(made.config, network))
        (made.folder / TARGETS_FILE).write_text(json.dumps(targets))

    @property
    def is_well(self) -> bool:
        return all(is_up(island) for island in self.islands)

    def play(self, attack: Attack, seconds: float, least_rounds: int = 0) -> Outcome:
        """Attack for so long, then stop, and measure. The attack goes on until `least_rounds` have
        been committed.
        """
        before = [_begin_peaks(island) for island in self.islands]
        bound = max(float((island.folder / BOUND_FILE).read_text()) for island in self.islands)
        num_refused, attackers = (
            self._num_refused(),
            [self._start(attack) for _ in range(attack.num_attackers)],
        )
        try:
            for attacker in attackers:
                until(
                    lambda a=attacker: self._has_begun(a),
                    "the attack's beginning",
                    attacker,
                    *self.islands,
                )
            begun = time.time()
            time.sleep(seconds)
            until(
                lambda: self._rounds(begun) >= least_rounds,
                "rounds during the attack",
                *self.islands,
            )
            ended, during = time.time(), self._rounds(begun)
            for attacker in attackers:
                assert attack.is_island or is_up(attacker), (
                    f"the attacker has ended:\n{attacker.log[-3000:]}"
                )
        finally:
            for attacker in attackers:
                _kill(attacker)
        self._all_take_part_again()
        peaks = [_peaks(island) for island in self.islands]
        return Outcome(
            attack=attack.name,
            network=self._network,
            has_key=attack.has_key,
            seconds=ended - begun,
            rounds_during=during,
            rounds_after=self._rounds(ended),
            longest_wait=_longest_wait(self.islands, begun, ended),
            bound=bound,
            grown=max(peak[0] - old[0] for peak, old in zip(peaks, before, strict=True)),
            daemon_grown=max(peak[1] - old[1] for peak, old in zip(peaks, before, strict=True)),
            refused=self._num_refused() - num_refused,
        )

    def assert_well(self) -> None:
        """No honest island has ended, the last loss of each is finite, and all of them have the
        same history.
        """
        for island in self.islands:
            assert is_up(island), f"{island.folder.name} has ended:\n{island.log[-3000:]}"
            assert island.records("step")[-1]["loss"] is not None, (
                f"{island.folder.name} has no finite loss any more"
            )
        assert_one_history(*self.islands)

    def _start(self, attack: Attack) -> Island:
        index, self._next = self._next, self._next + 1
        config = self._made.config
        if not attack.has_key:
            config = config.model_copy(
                update={"island": config.island.model_copy(update={"run_key_file": None})}
            )
        settings = config.island.model_copy(update={"joins": True})
        config = config.model_copy(update={"island": settings, "islands": []})
        return self._made.start(index, attack.work, config)

    def _has_begun(self, attacker: Island) -> bool:
        begun = Path(self._made.config.island.run_dir) / BEGUN_FILE.format(attacker.ranks[0].pid)
        return begun.exists() or bool(attacker.events("joined")) or not is_up(attacker)

    def _rounds(self, since: float) -> int:
        """Rounds by which the honest islands have gone on since then, by commits or with a state
        that they took.
        """
        reached = [moment for island in self.islands for moment in _progress(island)]
        before = max((round_number for time, round_number in reached if time <= since), default=0)
        return max(round_number for _, round_number in reached) - before

    def _num_refused(self) -> int:
        return sum(len(island.events("refused")) for island in self.islands)

    def _all_take_part_again(self) -> None:
        """Wait until all honest islands have committed some rounds together."""
        after = max(last_round(island) for island in self.islands)

        def has_come(island: Island) -> bool:
            new = [r for number, r in island.committed().items() if number > after]
            return sum(set(HONEST) <= set(r["participants"]) for r in new) >= LAST_ROUNDS

        until(
            lambda: all(map(has_come, self.islands)),
            "rounds of all honest islands after it",
            *self.islands,
        )


@contextmanager
def scene(folder: Path, network: str, *overrides: str) -> Iterator[Scene]:
    """Open a run with a run key in which the honest islands have committed some rounds. Kills all
    at exit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key_file = folder / "run.key"
    key_file.write_text("secret of a test's run " * 2)
    key_file.chmod(0o600)
    with ExitStack() as stack:
        if network == "hivemind":
            import hivemind  # noqa: F401 - the forked islands inherit it

            address = stack.enter_context(bootstrap(network, folder / "bootstrap")).address
        else:
            rendezvous = serve_rendezvous("127.0.0.1", 0, load_run_key(str(key_file)))
            stack.callback(rendezvous.close)
            address = rendezvous.address
        settings = [f"outer.transport={network}", f"name={folder.name}", "outer.rounds=100000"]
        settings += [
            "evaluate.every_rounds=100000",
            "outer.optimizer.momentum=0.9",
            f"outer.start_islands={NUM_HONEST}",
            # With a quorum of one, a member that trains alone, and faster than the others, makes
            # them follow it.
            f"outer.quorum={NUM_HONEST // 2 + 1}",
        ]
        settings += [f"island.run_key_file={key_file}", *overrides]
        islands = [{} for _ in range(NUM_HONEST)]
        made = stack.enter_context(swarm(folder, *settings, islands=islands, address=address))
        yield Scene(made, network)


def note_begin(config: Config) -> None:
    """Called by an attacker that is no island once it can attack."""
    (Path(config.island.run_dir) / BEGUN_FILE.format(os.getpid())).touch()


def targets(config: Config) -> dict[str, str]:
    """Control addresses of the honest leaders, by island. An attacker may know them from
    anywhere.
    """
    return json.loads((Path(config.island.run_dir) / TARGETS_FILE).read_text())


async def _find_targets(config: Config, network: str) -> dict[str, str]:
    key = load_run_key(config.island.run_key_file)
    settings = NetworkSettings(config.name, "looker", 0, config.island.bootstrap, run_key=key)
    looker = await open_network(network, settings)
    try:
        assert looker.membership is not None
        found = {}
        while len(found) < NUM_HONEST:  # records set no event
            found = await looker.membership.members()
            await asyncio.sleep(0.1)
        return {name: member.control_addresses[0] for name, member in found.items()}
    finally:
        await looker.close()


def _kill(island: Island) -> None:
    for pid in process_tree(island.ranks[0]) if is_up(island) else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    island.wait()


def _begin_peaks(island: Island) -> tuple[int, int]:
    """Let the peaks of memory begin anew. Returns the resident bytes of the process, and of its
    libp2p daemon.
    """
    for pid in process_tree(island.ranks[0]):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _peaks(island)


def _peaks(island: Island) -> tuple[int, int]:
    """The largest resident memory that the island's process has had, and that of its libp2p daemon,
    in bytes.
    """
    *children, process = process_tree(island.ranks[0])
    return _peak_of(process), sum(map(_peak_of, children))


def _peak_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _longest_wait(islands: Sequence[Island], begun: float, ended: float) -> float:
    """Longest time without a commit from the beginning of the attack to the first commit after it,
    in seconds.
    """
    first: dict[int, float] = {}  # when the first honest island had reached a round
    for moment, round_number in sorted(found for island in islands for found in _progress(island)):
        first.setdefault(round_number, moment)
    times = sorted(moment for moment in first.values() if moment > begun)
    later = next((t for t in times if t > ended), math.inf)
    return max(b - a for a, b in pairwise([begun, *(t for t in times if t <= ended), later]))


def _progress(island: Island) -> list[tuple[float, int]]:
    """(time, number of rounds behind the state) of each commit, and of each state that was taken
    from others.
    """
    taken = [(r["time"], r["text"]) for r in island.records("event") if r["name"] == "joined"]
    return [
        *((r["time"], number + 1) for number, r in island.committed().items()),
        *((time, int(text.split()[1].strip(","))) for time, text in taken),
    ]
