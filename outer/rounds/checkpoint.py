"""What an island's checkpoint holds of the outer loop: tensors by part, so that any mesh of the island can go on.

    outer/params/<part>          global params, fp32             outer/momentum/<part>   the outer optimizer's
    outer/residual/<part>        what coding this island's       outer/mean_residual/<part>   and the means that it
                                 pseudo-gradients has lost                                    encoded have lost
    outer/last_mean/<part>       of the part's last round, where merging or gates look at it
    outer/pushes/<part>          one number: of Delayed Nesterov, since momentum moved the part
    outer/norms/<part>/<island>  of a participant's parts that this island reduces (outer/anomalies.py), fp64

Residuals and norms are this island's own; they are never given to another.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from pydantic import Field, ValidationError

from outer.anomalies import History, history_of, tensor_of
from outer.config import MergeConfig
from outer.errors import InputError
from outer.feedback import Feedback
from outer.gates import Gates, Histories
from outer.island_state import IslandState
from outer.payloads import Mean
from outer.rounds import Digest, Message
from outer.state import PartState, Position

PARAMS, MOMENTUM, LAST_MEAN, PUSHES = "outer/params/", "outer/momentum/", "outer/last_mean/", "outer/pushes/"
RESIDUALS = "outer/residual/", "outer/mean_residual/"
NORMS = re.compile(r"outer/norms/(\d{1,9})/([A-Za-z0-9._-]{1,64})")


class Memory(Protocol):
    """What a rank keeps from round to round besides the global state; outer/reduce.py's Reducer is one."""

    @property
    def feedbacks(self) -> Sequence[Feedback]: ...
    @property
    def last_means(self) -> dict[int, tuple[int, Mapping[int, Mean]]]: ...
    @property
    def gates(self) -> Gates: ...


@dataclass(frozen=True)
class NoMemory:
    """Gossip keeps nothing."""

    feedbacks: Sequence[Feedback] = ()
    last_means: dict[int, tuple[int, Mapping[int, Mean]]] = field(default_factory=dict)
    gates: Gates = field(default_factory=lambda: Gates(MergeConfig()))


class SavedFacts(Message):
    """What goes with the tensors, as JSON."""

    position: Position
    digest: str = Digest
    """Of the global params and outer momentum."""
    fingerprint: str = Digest
    """Of the canonical space: which element lies in which part."""
    weights: list[int]
    """By fragment: tokens trained since it was sent last."""
    last_rounds: list[tuple[int, int]] = Field(default=[])
    """(fragment, round) of the means kept."""
    share: float
    units: int = Field(default=0, ge=0)
    """Of the island's lease, read by its progress."""


def tensors_of(held: IslandState, memory: Memory) -> dict[str, torch.Tensor]:
    """This rank's tensors by name, as they are: copy them before the next round."""
    tensors = {f"{PARAMS}{i}": values for i, values in held.mine.parts.items()}
    tensors |= {f"{MOMENTUM}{i}": values for i, values in held.mine.momentum.items()}
    tensors |= {f"{PUSHES}{i}": torch.tensor([float(number)]) for i, number in held.mine.pushes.items()}
    for prefix, feedback in zip(RESIDUALS, memory.feedbacks, strict=False):
        tensors |= {f"{prefix}{i}": values for i, values in feedback.residuals.items()}
    for _, means in memory.last_means.values():
        tensors |= {f"{LAST_MEAN}{i}": mean.values for i, mean in means.items()}
    for i, by_island in memory.gates.histories.items():
        tensors |= {f"outer/norms/{i}/{island}": tensor_of(history) for island, history in by_island.items()}
    return tensors


def room_for(held: IslandState, memory: Memory, saved: Collection[str]) -> dict[str, torch.Tensor]:
    """Zeros to load those of the `saved` tensors into that this rank carries now."""
    wanted = [PARAMS, MOMENTUM, *RESIDUALS[: len(memory.feedbacks)], LAST_MEAN]
    rooms = {
        f"{prefix}{index}": torch.zeros_like(values) for index, values in held.mine.parts.items() for prefix in wanted
    }
    rooms |= {f"{PUSHES}{index}": torch.zeros(1) for index in held.mine.pushes}
    rooms |= {name: tensor_of(History(0, 0)) for name in saved if _part_of_norms(name) in held.mine.parts}
    return {name: room for name, room in rooms.items() if name in saved}


def restore(held: IslandState, memory: Memory, facts: SavedFacts, tensors: Mapping[str, torch.Tensor]) -> None:
    """Global state and residuals become what was saved; local params are left alone. Every rank calls it.

    Raises InputError when they are of another canonical space, or not what the digest says.
    """
    if facts.fingerprint != held.space.fingerprint:
        raise InputError(
            "the checkpoint's parts are cut in another way: it is of a run with another model, outer.codec, "
            "outer.part_elements or outer.fragments"
        )
    parts, params, momentum = {}, _by_part(PARAMS, tensors), _by_part(MOMENTUM, tensors)
    pushes = {i: int(number.item()) for i, number in _by_part(PUSHES, tensors).items()}
    for i, values in held.mine.parts.items():
        if i not in params:
            raise InputError(f"the checkpoint has no part {i} of the global params")
        parts[i] = PartState(
            params[i], momentum.get(i, torch.zeros_like(values)), facts.position.round, pushes.get(i, 0)
        )
    held.restore(parts, facts.position)
    if held.digest != facts.digest:
        raise InputError(f"the checkpoint's global params have the digest {held.digest}, expected {facts.digest}")
    for prefix, feedback in zip(RESIDUALS, memory.feedbacks, strict=False):
        feedback.load(_by_part(prefix, tensors))
    no_bytes = torch.empty(0, dtype=torch.uint8)
    last = {i: Mean(values, no_bytes, b"") for i, values in _by_part(LAST_MEAN, tensors).items()}
    for fragment, round_number in facts.last_rounds:
        mine = {i: mean for i, mean in last.items() if held.space.parts[i].fragment == fragment}
        memory.last_means[fragment] = round_number, mine
    memory.gates.load(_histories(tensors), facts.position.round)


def facts_of(held: IslandState, memory: Memory, weights: Sequence[int], share: float, units: int) -> dict[str, object]:
    """What goes with `tensors_of`, as JSON values."""
    facts = SavedFacts(
        position=held.mine.position,
        digest=held.digest,
        fingerprint=held.space.fingerprint,
        weights=list(weights),
        last_rounds=[(fragment, number) for fragment, (number, _) in sorted(memory.last_means.items())],
        share=share,
        units=units,
    )
    return facts.model_dump(mode="json")


def read_facts(values: object) -> SavedFacts:
    """The facts in a checkpoint. Raises InputError when they are none."""
    try:
        return SavedFacts.model_validate(values, strict=False)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise InputError(f"the checkpoint's facts of the outer loop are not readable: {problem}") from None


def _histories(tensors: Mapping[str, torch.Tensor]) -> dict[int, Histories]:
    """Of norms, by part and participant. Raises InputError when they are none."""
    found: dict[int, dict[str, History]] = defaultdict(dict)
    for name, values in tensors.items():
        if match := NORMS.fullmatch(name):
            found[int(match[1])][match[2]] = history_of(values)
    return dict(found)


def _part_of_norms(name: str) -> int | None:
    """Whose norms a saved tensor of this name holds; None: it holds something else."""
    match = NORMS.fullmatch(name)
    return int(match[1]) if match else None


def _by_part(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {int(name.removeprefix(prefix)): values for name, values in tensors.items() if name.startswith(prefix)}
