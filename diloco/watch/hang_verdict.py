"""Why an island's ranks no longer move: which rank did not come to a collective that others wait in."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class GroupState:
    """The last collective that a rank has entered in a process group, by torch's flight recorder."""

    name: str
    purpose: str
    ranks: tuple[int, ...]
    sequence: int
    operation: str
    is_waiting: bool
    """Whether it has not come back from it."""

    def __str__(self) -> str:
        return f"{self.operation} {self.sequence} of {self.purpose} (ranks {listed(self.ranks)})"


@dataclass(frozen=True)
class RankState:
    """Where a rank stands: the work of its training thread, for how long, and the line that it is at."""

    rank: int
    work: str
    seconds: float
    place: str
    is_in_torch: bool
    """Whether that line is torch's, and may be waiting for other ranks; gloo does not record point-to-point calls."""
    groups: tuple[GroupState, ...] = ()

    @property
    def waits(self) -> list[GroupState]:
        """The collectives that it waits in."""
        return [group for group in self.groups if group.is_waiting]

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.work} for {self.seconds:.0f} s, at {self.place}"


def to_values(state: RankState) -> dict[str, Any]:
    """The state as values for JSON."""
    return asdict(state)


def from_values(values: dict[str, Any]) -> RankState:
    """What `to_values` was given."""
    groups = tuple(GroupState(**group | {"ranks": tuple(group["ranks"])}) for group in values["groups"])
    return RankState(**{**values, "groups": groups})


def group_states(
    entries: Iterable[Mapping[str, Any]], groups: Mapping[str, tuple[str, Sequence[int]]]
) -> list[GroupState]:
    """Of each of the island's groups (by name: purpose, ranks) the last entry of a flight recorder's trace.

    `entries` are in the order in which the collectives began.
    """
    last = {entry["process_group"][0]: entry for entry in entries if not entry["is_p2p"]}
    return [
        GroupState(
            name=name,
            purpose=groups[name][0],
            ranks=tuple(groups[name][1]),
            sequence=entry["collective_seq_id"],
            operation=entry["profiling_name"],
            is_waiting=not entry["retired"],
        )
        for name, entry in last.items()
        if name in groups
    ]


def verdict(states: Mapping[int, RankState], num_ranks: int) -> str:
    """Who keeps the others waiting, in one line. `states`: of the ranks that could say where they stand."""
    silent = [rank for rank in range(num_ranks) if rank not in states]
    absent = {rank: group for rank, group in absences(states).items() if rank in silent or not states[rank].waits}
    if absent:
        return "; ".join(absence(rank, group, states) for rank, group in sorted(absent.items()))
    if silent:
        return f"rank {listed(silent)} did not answer: frozen, dead or without its interpreter"
    waiting = [state for state in states.values() if state.waits]
    if waiting:
        waits = "; ".join(f"rank {state.rank} in {state.waits[0]}" for state in waiting)
        return f"every rank waits for others, in different collectives or over a network that is gone: {waits}"
    busy = [state for state in states.values() if not state.is_in_torch] or list(states.values())
    return "no collective is waited for; " + "; ".join(str(state) for state in busy)


def absences(states: Mapping[int, RankState]) -> dict[int, GroupState]:
    """By rank: a collective that others of its group wait in and that it has not entered."""
    found: dict[int, GroupState] = {}
    for state in states.values():
        for group in state.waits:
            for rank in group.ranks:
                if rank not in states or entered(states[rank], group.name) < group.sequence:
                    found.setdefault(rank, group)
    return found


def entered(state: RankState, group: str) -> int:
    """The number of the last collective that the rank entered in this group; 0: none."""
    return max((g.sequence for g in state.groups if g.name == group), default=0)


def absence(rank: int, group: GroupState, states: Mapping[int, RankState]) -> str:
    """One rank that did not come, and where it is instead."""
    waiting = [s.rank for s in states.values() if any(g.name == group.name for g in s.waits)]
    where = str(states[rank]) if rank in states else "it did not answer: frozen, dead or without its interpreter"
    return f"rank {rank} did not come to {group}, where rank {listed(waiting)} waits; {where}"


def listed(ranks: Sequence[int]) -> str:
    """Ranks in a line; of many, the first."""
    shown = " ".join(str(rank) for rank in sorted(ranks)[:16])
    return shown + (f" ... ({len(ranks)} in all)" if len(ranks) > 16 else "")
