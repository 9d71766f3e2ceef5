"""The table of a rehearsal: what each fault did to the run, from the run's own records."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from diloco.formatting import UNKNOWN, align, human_duration
from diloco.overview.overview import account_of
from diloco.records.faults import FaultRecord
from diloco.records.metrics import RoundRecord
from diloco.records.run_folder import IslandRecords, RunRecords

RETURNS = {"kill", "leave", "freeze", "cut", "join"}
"""Kinds of faults after which an island has to come, or come back. After a damaged payload it has
never been away.
"""


@dataclass(frozen=True)
class Outcome:
    """What one fault did to the run. Times are in seconds; None means that it did not happen."""

    fault: FaultRecord
    hit: tuple[str, ...]
    """The islands that it hit, or that joined. None if it hit the bootstrap process."""
    others: float | None
    """From the fault to the next commit of an island that it did not hit."""
    hits_all: bool
    """Whether it hit all islands that were in the run."""
    itself: float | None
    """From the fault's end (or the fault, if it has none) to the next commit of an island that it
    hit.
    """
    aborted: int
    """Attempts at rounds that failed until the next fault."""
    apart: int
    """Rounds that islands committed with different states until the next fault. Only a cut may do
    so.
    """

    @property
    def is_good(self) -> bool:
        """Return whether the run went on as it should, and whoever was away is back."""
        if self.apart and self.fault.kind != "cut":
            return False
        is_back = self.itself is not None or not self.hit or self.fault.kind not in RETURNS
        return (self.others is not None or self.hits_all) and is_back


def print_rehearsal(run: RunRecords, console: Console) -> bool:
    """Print the table and the verdict. Return whether everything went as it should."""
    outcomes = find_outcomes(run)
    disagreeing = account_of(run).disagreeing_rounds
    console.print()
    console.print("\n".join(align(_rows(outcomes))), soft_wrap=True, highlight=False)
    console.print()
    for line in _verdict(run, outcomes):
        console.print(line, soft_wrap=True, highlight=False)
    if disagreeing:
        console.print(
            f"PARTICIPANTS DISAGREE in rounds {', '.join(map(str, disagreeing))}: {run.run_dir}",
            soft_wrap=True,
        )
    is_good = all(outcome.is_good for outcome in outcomes)
    return bool(outcomes) and is_good and not disagreeing and _ends_equal(run.islands)


def find_outcomes(run: RunRecords) -> list[Outcome]:
    """Return what each injected fault did, in order."""
    begins = [fault for fault in run.faults if not fault.is_end]
    until = [fault.time for fault in begins[1:]] + [float("inf")]
    return [_outcome(run, fault, end) for fault, end in zip(begins, until, strict=True)]


def _outcome(run: RunRecords, fault: FaultRecord, until: float) -> Outcome:
    ends = [each.time for each in run.faults if each.is_end and fault.time <= each.time < until]
    names = (
        fault.islands if fault.kind != "join" else tuple(island.name for island in run.islands[-1:])
    )
    hit = [island for island in run.islands if island.name in names]
    present = [island for island in run.islands if island.all and island.all[0].time < fault.time]
    others = [island for island in present if island.name not in names]
    within = [
        record
        for island in run.islands
        for record in island.rounds
        if fault.time < record.time < until
    ]
    return Outcome(
        fault=fault,
        hit=tuple(island.name for island in hit),
        others=_seconds_to_commit(others, fault.time),
        hits_all=not others,
        itself=_seconds_to_commit(hit, max(ends, default=fault.time)),
        aborted=len({(record.round, record.attempt) for record in within if not record.committed}),
        apart=len(_differing_rounds(within)),
    )


def _seconds_to_commit(islands: Sequence[IslandRecords], since: float) -> float | None:
    commits = [
        record
        for island in islands
        for record in island.rounds
        if record.committed and record.time > since
    ]
    return min((record.time - since for record in commits), default=None)


def _differing_rounds(records: Sequence[RoundRecord]) -> list[int]:
    """Return the rounds that were committed with different states. With gossip no states are
    equal.
    """
    digests: dict[int, set[str]] = {}
    for record in records:
        if record.committed and not record.is_own:
            digests.setdefault(record.round, set()).add(record.digest)
    return sorted(number for number, found in digests.items() if len(found) > 1)


def _ends_equal(islands: Sequence[IslandRecords]) -> bool:
    """Return whether the last committed round is the same state on all islands that have committed
    it.
    """
    commits = [record for island in islands for record in island.rounds if record.committed]
    last = max((record.round for record in commits), default=0)
    return not _differing_rounds([record for record in commits if record.round == last])


def _rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    heads = (
        "what was done",
        "others commit after",
        "itself after",
        "failed attempts",
        "rounds apart",
    )
    rows = [
        (
            _describe(outcome),
            UNKNOWN if outcome.others is None else human_duration(outcome.others),
            UNKNOWN if outcome.itself is None else human_duration(outcome.itself),
            str(outcome.aborted),
            str(outcome.apart),
        )
        for outcome in outcomes
    ]
    return [heads, *rows]


def _describe(outcome: Outcome) -> str:
    """Return what the fault did, in words; the record's text where it says so itself."""
    fault = outcome.fault
    who = ", ".join(fault.islands)
    match fault.kind:
        case "corrupt":
            return f"damaged a payload of {who}"
        case "cut":
            return f"cut {who} off"
        case _:
            return fault.text


def _verdict(run: RunRecords, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield what follows from the table, a line for each."""
    num_rounds = len(
        {record.round for island in run.islands for record in island.rounds if record.committed}
    )
    equal = "equal" if _ends_equal(run.islands) else "NOT EQUAL"
    yield f"{num_rounds} rounds committed; at the end the digests of all islands are {equal}"
    if any(outcome.apart for outcome in outcomes if outcome.fault.kind == "cut"):
        yield (
            "while the link was cut, both sides went on, and the rounds of one side were thrown "
            "away afterwards; to let only a majority go on, set outer.quorum"
        )
    if bad := [_describe(outcome) for outcome in outcomes if not outcome.is_good]:
        yield f"NOT RECOVERED: {'; '.join(bad)}; the logs are in {run.run_dir}"
