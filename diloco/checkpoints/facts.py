"""The facts in an island's checkpoint manifest.

Another party may have written them: they are checked.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from diloco.runtime.progress import ResumePoint
from inner.checkpoint.folder import SavedCheckpoint
from inner.errors import InputError
from inner.optim.loss_scale import MAX_EXPONENT

Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Exponent = Annotated[int, Field(ge=0, le=MAX_EXPONENT)]
Loss = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class IslandFacts:
    """The values that an island saves besides its tensors."""

    outer: dict[str, Any]
    """The facts of the outer loop; `outer.rounds.checkpoint.parse_facts` parses them."""
    place: ResumePoint
    tokens: Count
    run: dict[str, Any]
    """The run's config as plain values, because a newer version may not accept it."""
    params: list[tuple[str, list[Count]]] = field(default_factory=list)
    """Name and shape of every parameter, in the canonical order."""
    reading_order: Count = 1
    """Version of the reading order to which the data ledger in `outer` refers."""
    losses: list[Loss] = field(default_factory=list)
    """The losses of the last inner steps, by which a spike is detected."""
    loss_scale: tuple[Exponent, Count, Count] | None = None
    """The fields of the trainer's LossScale; None unless the model computes in float16."""


MOST_ITEMS = {"params": 1 << 17, "losses": 1 << 14}
_FACTS = TypeAdapter(IslandFacts)


def parse_island_facts(checkpoint: SavedCheckpoint) -> IslandFacts:
    """Parse the facts of a checkpoint. Raises InputError if an island of this version did not write
    them.
    """
    for key, most in MOST_ITEMS.items():
        # pydantic would keep one error per wrong item.
        if isinstance(items := checkpoint.facts.get(key), list) and len(items) > most:
            raise InputError(
                f"{checkpoint.path}: {key} has {len(items)} items; at most {most} are allowed"
            )
    try:
        return _FACTS.validate_python(checkpoint.facts)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise InputError(
            f"{checkpoint.path}: not a checkpoint of an island of this version: {where}: "
            f"{problem['msg']}"
        ) from None
