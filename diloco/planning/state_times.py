"""What an island's state weighs: bytes and seconds to save it, to read it back, and to join."""

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.config.schema import RunConfig
from inner.measure.param_specs import num_elements
from inner.optim.state_bytes import find_state_bytes
from inner.param_spec import ParamSpec
from outer.cost import FP32_BYTES, memory_bytes, round_bytes

SHARED = ("global params", "averaged moments", "outer momentum")
"""State that is the same on every island: a joiner takes it from the others."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of an island's state, all ranks together."""

    saved: float
    """A checkpoint: local params, states of the inner optimizer, and the outer loop's state."""
    joined: float
    """What a joiner downloads: the state that all islands share, in fp32."""
    missed: float
    """What an island that has missed a round downloads for it: the round's means, encoded."""


def count_state_bytes(run: RunConfig, specs: Sequence[ParamSpec], num_islands: int) -> StateBytes:
    """Count the bytes of an island's state for a model with the parameters `specs`.

    `saved` is a little too small: indexes, positions in the text and random states are left out.
    """
    outer = memory_bytes(run.outer, tuple(specs), num_islands, num_ranks=1)
    shared = sum(outer.get(purpose, 0.0) for purpose in SHARED)
    own = outer.get("last mean", 0.0)
    if run.outer.coding.feedback is not None:
        # A residual of each part that the island sends, and of each mean that it has reduced.
        own += FP32_BYTES * num_elements(specs) * (1 + 1 / num_islands)
    rounds = round_bytes(run.outer, tuple(specs), num_islands)
    missed = sum(each.mean_bytes for each in rounds) / len(rounds)
    return StateBytes(_trained_bytes(run, specs) + own + shared, shared, missed)


def _trained_bytes(run: RunConfig, specs: Sequence[ParamSpec]) -> float:
    """Return the bytes of the local params and of the inner optimizer's states."""
    kept = find_state_bytes(run.optimizer)
    in_matrices = num_elements([spec for spec in specs if _is_block_matrix(spec)])
    in_others = num_elements(specs) - in_matrices
    states = kept.block_matrix * in_matrices + kept.other * in_others
    return FP32_BYTES * num_elements(specs) + states


def _is_block_matrix(spec: ParamSpec) -> bool:
    return spec.name.startswith("layers.") and spec.matrix_shape[1] > 1
