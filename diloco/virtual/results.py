"""Measurements of a virtual run: utilisation, time to commit, messages and bytes, and the first
bottleneck.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from diloco.virtual.fleet import Totals, VirtualFleet
from diloco.virtual.island import LandedRound, VirtualIsland

REPLY = "-reply"
LINK_IS_FULL = 0.6
"""If the busiest link is in use for at least this share of the reduce, the link limits the
reduce."""


@dataclass(frozen=True)
class RoundTimes:
    """The parts of a round in seconds, as means over islands and rounds."""

    compute: float
    """Time in inner steps."""
    others: float
    """Time of waiting until the last participant was ready."""
    plan: float
    reduce: float
    host: float
    """Time of the island's own work between its reduce and its vote."""
    vote: float

    @property
    def round(self) -> float:
        return self.compute + self.others + self.plan + self.reduce + self.host + self.vote


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results of a run. Rates and counts cover the time from the first to the last commit.

    The time before is left out, because the first commit waits until all islands have started.
    """

    num_islands: int
    num_rounds: int
    num_attempts: int
    """Largest number of attempts at these rounds by one island."""
    utilisation: float | None
    """Share of the islands' time in committed inner steps; None if there was only one round."""
    commit_seconds: Sequence[float]
    """Seconds from the last participant's ready to the commit, of each round and island, sorted."""
    terms: RoundTimes
    messages: Mapping[str, float]
    """Messages that an island sends per round, replies included, by kind."""
    sent_bytes: Mapping[str, float]
    """Bytes that an island sends per round, by kind of message."""
    link_share: float
    """Share of the time for which the busiest direction of any link was in use."""
    cpu_seconds: float
    """Real processor seconds of an island's code per round, as a mean over islands."""
    busiest_cpu: tuple[str, float]
    """The island whose code took the most processor time, with its seconds per round."""
    busiest_sender: tuple[str, float]
    """The island that sent the most bytes besides payloads, with its bytes per round."""
    virtual_seconds: float
    bottleneck: str
    num_steps_lost: int
    """Number of inner steps that no commit contains."""
    num_caught_up: int
    """How often an island took another island's state after it had entered the run."""
    errors: Mapping[str, str]
    """Why islands ended that no fault has ended, by name."""


def measure(fleet: VirtualFleet) -> Results:
    """Return the results of a run that is over."""
    landed = fleet.landed
    processes = fleet.processes
    terms, commit_seconds = _find_terms(landed)
    rounds, seconds, totals = _steady_totals(fleet)
    shares = max(rounds, 1) * len(fleet.islands)
    cpu = {name: value / max(rounds, 1) for name, value in totals.cpu_seconds.items()}
    busiest = max(cpu, key=lambda name: cpu[name])
    # A message counts in full when it begins, so a state still in transit at the end counts for
    # more than was sent.
    link_share = min(totals.link_seconds / seconds, 1.0) if seconds else 0.0
    made = sum(p.diary.num_steps for p in processes)
    kept = sum(each.num_steps for _, each in landed)
    return Results(
        num_islands=len(fleet.islands),
        num_rounds=fleet.num_rounds,
        num_attempts=max(
            (sum(each.num_attempts for each in p.diary.rounds) for p in processes), default=0
        ),
        utilisation=_find_utilisation(processes),
        commit_seconds=commit_seconds,
        terms=terms,
        messages=_by_kind(totals.counts.messages, shares),
        sent_bytes=_by_kind(totals.counts.num_bytes, shares),
        link_share=link_share,
        cpu_seconds=sum(cpu.values()) / len(fleet.islands),
        busiest_cpu=(busiest, cpu[busiest]),
        busiest_sender=_find_busiest_sender(totals.counts.small_bytes, rounds),
        virtual_seconds=fleet.world.now,
        bottleneck=_find_bottleneck(terms, link_share, sum(cpu.values()) / len(fleet.islands)),
        num_steps_lost=made - kept,
        num_caught_up=sum(p.diary.num_caught_up for p in processes),
        errors={p.seat.name: p.diary.error for p in processes if p.diary.error},
    )


def quantile(sorted_values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    return (
        sorted_values[min(int(share * len(sorted_values)), len(sorted_values) - 1)]
        if sorted_values
        else 0.0
    )


def _find_terms(
    landed: Sequence[tuple[VirtualIsland, LandedRound]],
) -> tuple[RoundTimes, list[float]]:
    """Return the mean terms of a round, and the sorted times to commit."""
    if not landed:
        return RoundTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0), []
    ready = find_ready([each for _, each in landed])
    terms = RoundTimes(
        compute=mean(each.num_steps * island.seat.step_seconds for island, each in landed),
        others=mean(max(ready[each.number] - each.ready_at, 0.0) for _, each in landed),
        plan=mean(max(each.planned_at - ready[each.number], 0.0) for _, each in landed),
        reduce=mean(each.reduced_at - each.planned_at for _, each in landed),
        host=mean(each.voted_at - each.reduced_at for _, each in landed),
        vote=mean(each.committed_at - each.voted_at for _, each in landed),
    )
    return terms, sorted(each.committed_at - ready[each.number] for _, each in landed)


def find_ready(landed: Sequence[LandedRound]) -> dict[int, float]:
    """Return, by round, when the last participant was ready for which the plan waited. Later ones
    only observed.
    """
    planned: dict[int, float] = {}
    for each in landed:
        planned[each.number] = min(planned.get(each.number, each.planned_at), each.planned_at)
    ready: dict[int, float] = defaultdict(float)
    for each in landed:
        if each.ready_at <= planned[each.number]:
            ready[each.number] = max(ready[each.number], each.ready_at)
    return ready


def _find_utilisation(processes: Sequence[VirtualIsland]) -> float | None:
    """Return the share of committed inner steps in the time between each process's first and last
    landing.
    """
    windows = [(p, p.diary.rounds) for p in processes if len(p.diary.rounds) > 1]
    total = sum(rounds[-1].landed_at - rounds[0].landed_at for _, rounds in windows)
    steps = sum(
        p.seat.step_seconds * sum(each.num_steps for each in rounds[1:]) for p, rounds in windows
    )
    return steps / total if total else None


def _steady_totals(fleet: VirtualFleet) -> tuple[int, float, Totals]:
    """Return the rounds after the first commit and before the last one, their virtual seconds, and
    their totals.

    The last round counts only if there is no other, because islands begin to leave at its commit.
    """
    begun = min((number for number in fleet.totals if number > 0), default=0)
    ended = max(
        (number for number in fleet.totals if begun < number < fleet.num_rounds),
        default=fleet.num_rounds,
    )
    first = fleet.totals[begun if begun < ended else 0]
    last = fleet.totals[ended]
    return last.num_rounds - first.num_rounds, last.at - first.at, last.since(first)


def _find_busiest_sender(small_bytes: Mapping[str, int], rounds: int) -> tuple[str, float]:
    busiest = max(small_bytes, key=lambda name: small_bytes[name], default="")
    return busiest, small_bytes.get(busiest, 0) / max(rounds, 1)


def _by_kind(counts: Mapping[str, int], shares: int) -> dict[str, float]:
    """Return counts by kind of message, per island and round. Replies count with their calls."""
    by_kind: dict[str, float] = defaultdict(float)
    for kind, number in counts.items():
        by_kind[kind.removesuffix(REPLY)] += number / shares
    return dict(sorted(by_kind.items(), key=lambda item: -item[1]))


def _find_bottleneck(terms: RoundTimes, link_share: float, cpu_seconds: float) -> str:
    """Return the longest term of a round apart from inner steps, in words."""
    is_full = link_share * terms.round > LINK_IS_FULL * terms.reduce
    causes = {
        "slow islands: the others wait for them": terms.others,
        "round trips of small messages": terms.plan + terms.vote,
        "the links: payloads" if is_full else "round trips and queues of payloads": terms.reduce,
        "the islands' own work in a round": terms.host,
        "the islands' processors: their part in the protocol": cpu_seconds,
    }
    return max(causes, key=lambda cause: causes[cause])
