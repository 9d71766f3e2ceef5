"""Bytes that data-parallel training would send, to compare a run with."""

BYTES_PER_GRADIENT = 2


def data_parallel_bytes_per_step(num_params: int, num_islands: int) -> float:
    """Return the bytes that one island sends in one bf16 ring all-reduce of the gradients."""
    return 2 * (num_islands - 1) / num_islands * BYTES_PER_GRADIENT * num_params
