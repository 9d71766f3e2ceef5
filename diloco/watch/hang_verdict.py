"""Diagnoses why an island hangs: finds the ranks that did not enter a collective in which others wait."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GroupState:
    """The last collective that a rank has entered in a process group, according to torch's flight recorder."""

    name: str
    purpose: str
    ranks: tuple[int, ...]
    sequence: int
    operation: str
    is_waiting: bool
    """Whether the collective has not returned yet."""

    def __str__(self) -> str:
        return f"{self.operation} {self.sequence} of {self.purpose} (ranks {format_ranks(self.ranks)})"


@dataclass(frozen=True)
class RankState:
    """The state of a rank: the current work of its training thread, its duration so far, and the line in execution."""

    rank: int
    work: str
    seconds: float
    location: str
    is_in_torch: bool
    """Whether that line is in torch and so may wait for other ranks: gloo does not record point-to-point calls."""
    groups: tuple[GroupState, ...] = ()

    @property
    def waits(self) -> list[GroupState]:
        """The collectives in which the rank waits."""
        return [group for group in self.groups if group.is_waiting]

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.work} for {self.seconds:.0f} s, at {self.location}"


def from_values(values: dict[str, Any]) -> RankState:
    """Convert the JSON of `dataclasses.asdict(state)` back to a state."""
    groups = tuple(GroupState(**group | {"ranks": tuple(group["ranks"])}) for group in values["groups"])
    return RankState(**{**values, "groups": groups})


def group_states(
    entries: Iterable[Mapping[str, Any]], groups: Mapping[str, tuple[str, tuple[int, ...]]]
) -> list[GroupState]:
    """The last collective in each of the island's process groups, from a trace of torch's flight recorder.

    `entries` is the trace in the order in which the collectives began; `groups` has purpose and ranks by group name.
    """
    last = {entry["process_group"][0]: entry for entry in entries if not entry["is_p2p"]}
    return [
        GroupState(name, *groups[name], entry["collective_seq_id"], entry["profiling_name"], not entry["retired"])
        for name, entry in last.items()
        if name in groups
    ]


def verdict(states: Mapping[int, RankState], num_ranks: int) -> str:
    """One line that names the ranks that keep the others waiting. `states` has the ranks that have answered."""
    silent = [rank for rank in range(num_ranks) if rank not in states]
    absent = {rank: group for rank, group in find_absences(states).items() if rank in silent or not states[rank].waits}
    if absent:
        return "; ".join(describe_absence(rank, group, states) for rank, group in sorted(absent.items()))
    if silent:
        return f"rank {format_ranks(silent)} did not answer: frozen, dead or without its interpreter"
    waiting = [state for state in states.values() if state.waits]
    if waiting:
        waits = "; ".join(f"rank {state.rank} in {state.waits[0]}" for state in waiting)
        return f"every rank waits for others, in different collectives or over a network that is gone: {waits}"
    busy = [state for state in states.values() if not state.is_in_torch] or list(states.values())
    return "no collective is waited for; " + "; ".join(str(state) for state in busy)


def find_absences(states: Mapping[int, RankState]) -> dict[int, GroupState]:
    """For each absent rank a collective that it has not entered and in which other ranks of the group wait."""
    absent: dict[int, GroupState] = {}
    for state in states.values():
        for group in state.waits:
            for rank in group.ranks:
                entered = [g.sequence for g in states[rank].groups if g.name == group.name] if rank in states else [-1]
                if max(entered, default=0) < group.sequence:
                    absent.setdefault(rank, group)
    return absent


def describe_absence(rank: int, group: GroupState, states: Mapping[int, RankState]) -> str:
    """One line that says where a rank is instead of in the collective `group`."""
    waiting = [s.rank for s in states.values() if any(g.name == group.name for g in s.waits)]
    where = str(states[rank]) if rank in states else "it did not answer: frozen, dead or without its interpreter"
    return f"rank {rank} did not come to {group}, where rank {format_ranks(waiting)} waits; {where}"


def format_ranks(ranks: Sequence[int]) -> str:
    """The ranks in one line, shortened if there are more than 16."""
    shown = " ".join(str(rank) for rank in sorted(ranks)[:16])
    return shown + (f" ... ({len(ranks)} in all)" if len(ranks) > 16 else "")
