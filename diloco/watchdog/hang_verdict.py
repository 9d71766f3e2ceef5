"""Diagnoses why an island hangs: finds the ranks that did not enter a collective with the others.

gloo's collectives block the training thread, so a rank waits in the last one that it has entered.
NCCL's collectives only enqueue a kernel: the training thread goes on, enqueues more, and waits
where it reads a number from the GPU. It then waits for the first collective of a group that has not
completed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class GroupState:
    """A rank's state in a process group, by torch's flight recorder.

    It is the collective that the rank waits for, or else the rank's last one.
    """

    name: str
    """Name of the group and its backend.

    A group may have a backend for each type of device, with sequences of their own.
    """
    purpose: str
    ranks: tuple[int, ...]
    sequence: int
    entered: int
    """Sequence number of the last collective that the rank has entered; with NCCL, has enqueued."""
    operation: str
    is_waiting: bool
    """Whether the collective has not completed yet."""

    @property
    def blocks(self) -> bool:
        """Whether the rank's thread waits inside the collective itself."""
        return self.is_waiting and not self.operation.startswith("nccl:")

    def __str__(self) -> str:
        return (
            f"{self.operation} {self.sequence} of {self.purpose} (ranks {format_ranks(self.ranks)})"
        )


@dataclass(frozen=True)
class RankState:
    """The state of a rank: its training thread's work, for how many seconds, and the current
    line.
    """

    rank: int
    work: str
    seconds: float
    location: str
    may_wait: bool
    """Whether the line is in torch or reads a tensor, and so may wait for other ranks.

    Not all waits are recorded.
    """
    groups: tuple[GroupState, ...] = ()

    @property
    def waits(self) -> list[GroupState]:
        """The collectives of this rank that have not completed."""
        return [group for group in self.groups if group.is_waiting]

    @property
    def is_held(self) -> bool:
        """Whether a collective keeps the rank from entering others.

        NCCL's collectives do so only where the thread waits for them.
        """
        return any(group.blocks for group in self.waits) or (bool(self.waits) and self.may_wait)

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.work} for {self.seconds:.0f} s, at {self.location}"


def from_values(values: dict[str, Any]) -> RankState:
    """Convert the JSON of `dataclasses.asdict(state)` back to a state."""
    groups = tuple(
        GroupState(**group | {"ranks": tuple(group["ranks"])}) for group in values["groups"]
    )
    return RankState(**{**values, "groups": groups})


def group_states(
    entries: Iterable[Mapping[str, Any]], groups: Mapping[str, tuple[str, tuple[int, ...]]]
) -> list[GroupState]:
    """Return the states of the island's process groups, from torch's flight recorder.

    `entries` is the recorder's trace in the order in which the collectives began; `groups` has the
    purpose and ranks by group name.
    """
    found: dict[str, GroupState] = {}
    for entry in entries:
        name = entry["process_group"][0]
        operation = entry["profiling_name"]
        sequence = entry["collective_seq_id"]
        if entry["is_p2p"] or name not in groups:
            continue
        name_of_backend = f"{name}/{operation.partition(':')[0]}"
        earlier = found.get(name_of_backend)
        if earlier is not None and earlier.is_waiting:
            found[name_of_backend] = replace(earlier, entered=sequence)
        else:
            values = sequence, sequence, operation, not is_complete(entry)
            found[name_of_backend] = GroupState(name_of_backend, *groups[name], *values)
    return list(found.values())


def is_complete(entry: Mapping[str, Any]) -> bool:
    """Return whether a collective of the trace has completed.

    gloo's collectives are retired then; the recorder also asks NCCL's kernels for their state.
    """
    return entry["retired"] or entry["state"] == "completed"


def verdict(states: Mapping[int, RankState], num_ranks: int) -> str:
    """Return one line that names the ranks for which the others wait.

    `states` has the ranks that have answered.
    """
    silent = [rank for rank in range(num_ranks) if rank not in states]
    absent = {
        rank: group
        for rank, group in find_absences(states).items()
        if rank in silent or not states[rank].is_held
    }
    if absent:
        return "; ".join(
            describe_absence(rank, group, states) for rank, group in sorted(absent.items())
        )
    if silent:
        return (
            f"rank {format_ranks(silent)} did not answer: frozen, dead, or with a blocked "
            "interpreter"
        )
    waiting = [state for state in states.values() if state.waits]
    if waiting:
        waits = "; ".join(f"rank {state.rank} in {state.waits[0]}" for state in waiting)
        return (
            "every rank waits for others, in different collectives or over a broken network: "
            f"{waits}"
        )
    busy = [state for state in states.values() if not state.may_wait] or list(states.values())
    return "no collective is waited for; " + "; ".join(str(state) for state in busy)


def find_absences(states: Mapping[int, RankState]) -> dict[int, GroupState]:
    """Return, for each absent rank, a collective that it has not entered and that others wait
    in.
    """
    absent: dict[int, GroupState] = {}
    for state in states.values():
        for group in state.waits:
            for rank in group.ranks:
                entered = (
                    [g.entered for g in states[rank].groups if g.name == group.name]
                    if rank in states
                    else [-1]
                )
                if max(entered, default=0) < group.sequence:
                    absent.setdefault(rank, group)
    return absent


def describe_absence(rank: int, group: GroupState, states: Mapping[int, RankState]) -> str:
    """Return one line about where a rank is instead of in the collective `group`."""
    waiting = [s.rank for s in states.values() if any(g.name == group.name for g in s.waits)]
    where = (
        str(states[rank])
        if rank in states
        else ("it did not answer: frozen, dead, or with a blocked interpreter")
    )
    return (
        f"rank {rank} did not enter {group}, in which rank {format_ranks(waiting)} waits; {where}"
    )


def reads_tensor(code: str) -> bool:
    """Return whether an expression copies a tensor to the host, which waits for all GPU work."""
    return re.search(r"\.(item|tolist|cpu|synchronize)\(\)$", code) is not None


def format_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks in one line, shortened if there are more than 16."""
    shown = " ".join(str(rank) for rank in sorted(ranks)[:16])
    return shown + (f" ... ({len(ranks)} in all)" if len(ranks) > 16 else "")
