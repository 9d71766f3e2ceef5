"""The outer loop's part of an island's checkpoint: tensors by part, so that any mesh of the island
can load it.

    outer/params/<part>          global params, fp32
    outer/momentum/<part>        momentum of the outer optimizer, fp32
    outer/pushes/<part>          one number: pushes of Delayed Nesterov since the momentum moved the
                                 part
    outer/residual/<part>        error feedback of the pseudo-gradients that this island encoded
    outer/mean_residual/<part>   error feedback of the means that it encoded as their reducer
    outer/last_mean/<part>       the mean of the part's last round, where a merge rule or a filter
                                 uses it
    outer/norms/<part>/<island>  running norms of a participant's parts
                                 (outer/reduce/norm_zscore.py), fp64

Residuals and norms are this island's own; no other island ever receives them.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import torch
from pydantic import Field, ValidationError

from outer.agreement.proofs.certificate import Proof
from outer.codecs.packing.checks import is_finite
from outer.config import MergeConfig
from outer.errors import InputError
from outer.leases.ranges import MAX_UNIT
from outer.network.endpoints import ISLAND_NAME
from outer.network.messages import (
    MAX_PARTS,
    MAX_ROUND,
    MAX_TOKENS,
    Digest,
    Message,
    PartNumber,
    UnknownFieldError,
)
from outer.reduce.error_feedback import ErrorFeedback
from outer.reduce.filters import Histories, OutlierFilters
from outer.reduce.norm_zscore import History, parse_history, to_tensor
from outer.reduce.payloads import Mean
from outer.space.digest import state_digest
from outer.state.earlier import EarlierState
from outer.state.part_state import MAX_GIVEN, PartState, Position
from outer.state.pending import PendingProgress
from outer.state.replica import Replica

PARAMS = "outer/params/"
MOMENTUM = "outer/momentum/"
LAST_MEAN = "outer/last_mean/"
PUSHES = "outer/pushes/"
RESIDUALS = "outer/residual/", "outer/mean_residual/"
NORMS = re.compile(rf"outer/norms/(\d{{1,9}})/({ISLAND_NAME})")


class RoundMemory(Protocol):
    """The data that a rank keeps from round to round besides the replica.
    `outer.reduce.reducer.Reducer` implements it.
    """

    @property
    def feedbacks(self) -> Sequence[ErrorFeedback]: ...
    @property
    def last_means(self) -> dict[int, tuple[int, Mapping[int, Mean]]]: ...
    @property
    def filters(self) -> OutlierFilters: ...
    def forget(self) -> None: ...


@dataclass(frozen=True)
class NoMemory:
    """The round memory of a gossip run, which keeps nothing."""

    feedbacks: Sequence[ErrorFeedback] = ()
    last_means: dict[int, tuple[int, Mapping[int, Mean]]] = field(default_factory=dict)
    filters: OutlierFilters = field(default_factory=lambda: OutlierFilters(MergeConfig()))

    def forget(self) -> None:
        """Do nothing: this memory is empty."""


class SavedFacts(Message):
    """The facts saved beside the tensors, as JSON."""

    position: Position
    digest: Digest
    """Digest of the global params and outer momentum."""
    fingerprint: Digest
    """Fingerprint of the canonical space, which decides the part of each element."""
    weights: list[Annotated[int, Field(ge=0, lt=MAX_TOKENS)]] = Field(max_length=MAX_PARTS)
    """Tokens trained on since each fragment was last sent."""
    expert_weights: list[Annotated[int, Field(ge=0, lt=MAX_TOKENS)]] = Field(
        default=[], max_length=MAX_PARTS
    )
    """Tokens trained on since each fragment's experts were last sent. Empty in older
    checkpoints.
    """
    counted: list[Annotated[int, Field(ge=0, lt=MAX_TOKENS)]] = Field(
        default=[], max_length=MAX_PARTS
    )
    """How often each group of experts was chosen since it was last sent."""
    last_rounds: list[tuple[PartNumber, Annotated[int, Field(ge=0, lt=MAX_ROUND)]]] = Field(
        default=[], max_length=MAX_PARTS
    )
    """(fragment, round) of each last mean that is kept."""
    share: float = Field(ge=0, le=1)
    proof: Proof = Proof()
    """The proof that the state was committed."""
    units: int = Field(default=0, ge=0, le=MAX_UNIT)
    """Number of units of the island's lease that have been read for its pending progress."""


def collect_tensors(replica: Replica, memory: RoundMemory) -> dict[str, torch.Tensor]:
    """Return this rank's tensors by name. They are not copies: copy them before the next round."""
    tensors = {f"{PARAMS}{i}": values for i, values in replica.carried.parts.items()}
    tensors |= {f"{MOMENTUM}{i}": values for i, values in replica.carried.momentum.items()}
    tensors |= {
        f"{PUSHES}{i}": torch.tensor([float(number)])
        for i, number in replica.carried.pushes.items()
    }
    for prefix, feedback in zip(RESIDUALS, memory.feedbacks, strict=False):
        tensors |= {f"{prefix}{i}": values for i, values in feedback.residuals.items()}
    for _, means in memory.last_means.values():
        tensors |= {f"{LAST_MEAN}{i}": mean.values for i, mean in means.items()}
    for i, by_island in memory.filters.histories.items():
        tensors |= {
            f"outer/norms/{i}/{island}": to_tensor(history) for island, history in by_island.items()
        }
    return tensors


def allocate(
    replica: Replica, memory: RoundMemory, saved: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return zero tensors to load into, for the `saved` names that belong to parts this rank
    carries now.
    """
    wanted = [PARAMS, MOMENTUM, *RESIDUALS[: len(memory.feedbacks)], LAST_MEAN]
    rooms = {
        f"{prefix}{index}": torch.zeros_like(values)
        for index, values in replica.carried.parts.items()
        for prefix in wanted
    }
    rooms |= {f"{PUSHES}{index}": torch.zeros(1) for index in replica.carried.pushes}
    rooms |= {
        name: to_tensor(History(0, 0))
        for name in saved
        if _part_of_norms(name) in replica.carried.parts
    }
    return {name: room for name, room in rooms.items() if name in saved}


def restore(
    replica: Replica, memory: RoundMemory, facts: SavedFacts, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Restore global state, residuals and norms; local params do not change. Every rank calls it
    together.

    Raises InputError if the checkpoint belongs to another canonical space, does not match its
    digest, or holds values that no island saves.
    """
    earlier = read_earlier(replica, facts, tensors)
    replica.restore(earlier.parts, facts.position)
    for prefix, feedback in zip(RESIDUALS, memory.feedbacks, strict=False):
        feedback.load(_by_part(prefix, tensors))
    no_bytes = torch.empty(0, dtype=torch.uint8)
    last = {i: Mean(values, no_bytes) for i, values in _by_part(LAST_MEAN, tensors).items()}
    for fragment, round_number in facts.last_rounds:
        mine = {i: mean for i, mean in last.items() if replica.space.parts[i].fragment == fragment}
        memory.last_means[fragment] = round_number, mine
    memory.filters.load(_histories(tensors), facts.position.round)


def read_earlier(
    replica: Replica, facts: SavedFacts, tensors: Mapping[str, torch.Tensor]
) -> EarlierState:
    """Return the saved global state without changing anything. Every rank calls it together.

    Raises InputError like `restore`.
    """
    if facts.fingerprint != replica.space.fingerprint:
        raise InputError(
            "the checkpoint's parts have other boundaries: it is of a run with another model, "
            "outer.codec, outer.part_elements or outer.fragments"
        )
    _check_finite(tensors)
    number = facts.position.round
    parts = dict[int, PartState]()
    params = _by_part(PARAMS, tensors)
    momentum = _by_part(MOMENTUM, tensors)
    pushes = {i: _parse_pushes(saved) for i, saved in _by_part(PUSHES, tensors).items()}
    for i, values in replica.carried.parts.items():
        if i not in params:
            raise InputError(f"the checkpoint has no part {i} of the global params")
        none = torch.empty(0) if replica.space.parts[i].is_replaced else torch.zeros_like(values)
        parts[i] = PartState(params[i], momentum.get(i, none), number, pushes.get(i, 0))
    digests = {i: part.digest for i, part in parts.items() if replica.space.parts[i].is_committed}
    parts_digest = replica.combine(digests, replica.ranks)
    digest = state_digest(parts_digest, facts.position.ledger.text)
    if digest != facts.digest:
        raise InputError(
            f"the checkpoint's global params have the digest {digest}, expected {facts.digest}"
        )
    return EarlierState(number, parts_digest, parts)


def build_facts(
    replica: Replica,
    memory: RoundMemory,
    pending: PendingProgress,
    share: float,
    units: int,
    proof: Proof,
) -> dict[str, object]:
    """Return the facts to save beside `collect_tensors`, as JSON values."""
    facts = SavedFacts(
        position=replica.position,
        digest=replica.digest,
        fingerprint=replica.space.fingerprint,
        weights=pending.weights,
        expert_weights=pending.expert_weights,
        counted=list(pending.counted.values()),
        last_rounds=[
            (fragment, number) for fragment, (number, _) in sorted(memory.last_means.items())
        ],
        share=share,
        units=units,
        proof=proof,
    )
    return facts.model_dump(mode="json")


def restore_pending(pending: PendingProgress, facts: SavedFacts) -> None:
    """Continue with the progress that was saved."""
    pending.weights = facts.weights
    pending.expert_weights = facts.expert_weights or pending.expert_weights
    if len(facts.counted) == len(pending.counted):
        pending.counted = dict(zip(pending.counted, facts.counted, strict=True))


def parse_facts(values: object) -> SavedFacts:
    """Parse the facts in a checkpoint. Raises InputError if they are malformed."""
    try:
        return SavedFacts.model_validate(values, strict=False)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise InputError(
            f"the checkpoint's facts of the outer loop are not readable: {problem}"
        ) from None
    except UnknownFieldError as error:
        raise InputError(
            f"the checkpoint's facts of the outer loop are not readable: {error}"
        ) from None


def _check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise InputError for a tensor with inf or nan. No island saves one, and each round after
    loading it would fail.
    """
    for name, values in tensors.items():
        if not is_finite(values):
            raise InputError(f"the checkpoint's {name} holds inf or nan; use another checkpoint")


def _parse_pushes(values: torch.Tensor) -> int:
    """Return the number of pushes in a checkpoint's tensor. Raises InputError if it is not a
    possible number.
    """
    number = float(values.item())
    if not number.is_integer() or not 0 <= number < MAX_GIVEN:
        raise InputError(
            f"the checkpoint's number of pushes is {number}, 0 to {MAX_GIVEN - 1} are possible"
        )
    return int(number)


def _histories(tensors: Mapping[str, torch.Tensor]) -> dict[int, Histories]:
    """Return the histories of norms by part and participant. Raises InputError if one is
    malformed.
    """
    found: dict[int, dict[str, History]] = defaultdict(dict)
    for name, values in tensors.items():
        if match := NORMS.fullmatch(name):
            found[int(match[1])][match[2]] = parse_history(values)
    return dict(found)


def _part_of_norms(name: str) -> int | None:
    """Return the index of the part whose norms a tensor of this name holds, or None for other
    tensors.
    """
    match = NORMS.fullmatch(name)
    return int(match[1]) if match else None


def _by_part(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {
        int(name.removeprefix(prefix)): values
        for name, values in tensors.items()
        if name.startswith(prefix)
    }
