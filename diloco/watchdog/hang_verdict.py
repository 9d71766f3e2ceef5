"""Diagnoses why an island hangs: finds the ranks that did not enter a collective in which others wait.

gloo's collectives block the training thread, so a rank waits in the last one that it has entered. NCCL's only enqueue a
kernel: the training thread goes on, enqueues more, and waits where it reads a number from the GPU. What the rank waits
for is the first collective of a group that has not completed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class GroupState:
    """The collective that a rank waits for in a process group, or else its last one, by torch's flight recorder."""

    name: str
    """Of the group and its backend: a group may have one for each type of device, with sequences of their own."""
    purpose: str
    ranks: tuple[int, ...]
    sequence: int
    entered: int
    """Sequence number of the last collective that the rank has entered, with NCCL enqueued."""
    operation: str
    is_waiting: bool
    """Whether the collective has not completed yet."""

    @property
    def blocks(self) -> bool:
        """Whether the rank's thread waits in the collective itself."""
        return self.is_waiting and not self.operation.startswith("nccl:")

    def __str__(self) -> str:
        return f"{self.operation} {self.sequence} of {self.purpose} (ranks {format_ranks(self.ranks)})"


@dataclass(frozen=True)
class RankState:
    """The state of a rank: the current work of its training thread, its duration so far, and the line in execution."""

    rank: int
    work: str
    seconds: float
    location: str
    may_wait: bool
    """Whether that line is in torch or reads a tensor, and so may wait for other ranks: not all waits are recorded."""
    groups: tuple[GroupState, ...] = ()

    @property
    def waits(self) -> list[GroupState]:
        """The collectives of this rank that have not completed."""
        return [group for group in self.groups if group.is_waiting]

    @property
    def is_held(self) -> bool:
        """Whether one of them keeps the rank from entering others. NCCL's do only where the thread waits for them."""
        return any(group.blocks for group in self.waits) or (bool(self.waits) and self.may_wait)

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.work} for {self.seconds:.0f} s, at {self.location}"


def from_values(values: dict[str, Any]) -> RankState:
    """Convert the JSON of `dataclasses.asdict(state)` back to a state."""
    groups = tuple(GroupState(**group | {"ranks": tuple(group["ranks"])}) for group in values["groups"])
    return RankState(**{**values, "groups": groups})


def group_states(
    entries: Iterable[Mapping[str, Any]], groups: Mapping[str, tuple[str, tuple[int, ...]]]
) -> list[GroupState]:
    """The state of each of the island's process groups, from a trace of torch's flight recorder.

    `entries` is the trace in the order in which the collectives began; `groups` has purpose and ranks by group name.
    """
    found: dict[str, GroupState] = {}
    for entry in entries:
        name, operation, sequence = entry["process_group"][0], entry["profiling_name"], entry["collective_seq_id"]
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
    """Whether a collective of the trace is over. Gloo's are retired then; NCCL's kernels are also asked themselves."""
    return entry["retired"] or entry["state"] == "completed"


def verdict(states: Mapping[int, RankState], num_ranks: int) -> str:
    """One line that names the ranks that keep the others waiting. `states` has the ranks that have answered."""
    silent = [rank for rank in range(num_ranks) if rank not in states]
    absent = {
        rank: group for rank, group in find_absences(states).items() if rank in silent or not states[rank].is_held
    }
    if absent:
        return "; ".join(describe_absence(rank, group, states) for rank, group in sorted(absent.items()))
    if silent:
        return f"rank {format_ranks(silent)} did not answer: frozen, dead or without its interpreter"
    waiting = [state for state in states.values() if state.waits]
    if waiting:
        waits = "; ".join(f"rank {state.rank} in {state.waits[0]}" for state in waiting)
        return f"every rank waits for others, in different collectives or over a network that is gone: {waits}"
    busy = [state for state in states.values() if not state.may_wait] or list(states.values())
    return "no collective is waited for; " + "; ".join(str(state) for state in busy)


def find_absences(states: Mapping[int, RankState]) -> dict[int, GroupState]:
    """For each absent rank a collective that it has not entered and in which other ranks of the group wait."""
    absent: dict[int, GroupState] = {}
    for state in states.values():
        for group in state.waits:
            for rank in group.ranks:
                entered = [g.entered for g in states[rank].groups if g.name == group.name] if rank in states else [-1]
                if max(entered, default=0) < group.sequence:
                    absent.setdefault(rank, group)
    return absent


def describe_absence(rank: int, group: GroupState, states: Mapping[int, RankState]) -> str:
    """One line that says where a rank is instead of in the collective `group`."""
    waiting = [s.rank for s in states.values() if any(g.name == group.name for g in s.waits)]
    where = str(states[rank]) if rank in states else "it did not answer: frozen, dead or without its interpreter"
    return f"rank {rank} did not come to {group}, where rank {format_ranks(waiting)} waits; {where}"


def reads_tensor(code: str) -> bool:
    """Whether an expression in execution copies a tensor to the host, which waits for all that the GPU has to do."""
    return re.search(r"\.(item|tolist|cpu|synchronize)\(\)$", code) is not None


def format_ranks(ranks: Sequence[int]) -> str:
    """The ranks in one line, shortened if there are more than 16."""
    shown = " ".join(str(rank) for rank in sorted(ranks)[:16])
    return shown + (f" ... ({len(ranks)} in all)" if len(ranks) > 16 else "")
