"""Memory that the inner optimizers keep per element of a parameter. No torch here, unless an own
optimizer is tried.
"""

from dataclasses import dataclass

from inner.config import OptimizerConfig


@dataclass(frozen=True)
class StateBytes:
    """Bytes per element: of the matrices in the blocks, and of all other parameters."""

    block_matrix: int
    other: int


STATE_BYTES = {"adamw": StateBytes(8, 8), "sgd": StateBytes(0, 0), "muon": StateBytes(4, 8)}


def find_state_bytes(config: OptimizerConfig) -> StateBytes:
    """Return the bytes that a config's optimizer keeps. An own optimizer is tried on small tensors.
    Raises InputError if that fails.
    """
    if config.state_dtype == "bfloat16":
        return StateBytes(4, 4)
    if config.name in STATE_BYTES:
        return STATE_BYTES[config.name]
    from inner.optim.own_optimizer import measure_state_bytes

    measured = measure_state_bytes(config)
    return StateBytes(measured, measured)
