"""Sizes of parts: how many elements a part of the canonical space has."""

MIN_PARTS = 16
SMALL_MIN_PARTS = 8
"""Minimum numbers of parts. Tensors that are sent together are cut into a multiple of this
number, and of a power of two that is at least the number of islands. So all islands reduce
equally much, coding and sending overlap, and a run may resume with a few islands more or fewer."""
SMALL_PART_ELEMENTS = 1 << 17
"""If each of MIN_PARTS parts would have fewer elements than this, SMALL_MIN_PARTS is used,
because a payload takes 0.3 ms of an island's processor."""

PART_ELEMENTS = ((4_000_000_000, 1 << 22), (1_000_000_000, 1 << 21), (0, 1 << 20))
"""(parameters, size of a part). The first row whose number of parameters the model reaches is
used. Parts are large, because each payload takes host time. The parts of a small model follow
from MIN_PARTS."""
BUFFER_PART_ELEMENTS = 1 << 12
"""Least size of a part of buffers. Small parts cost time, and buffers are too small for all islands
to reduce some."""


def choose_part_elements(num_params: int) -> int:
    """Return the size of the largest part of a model with `num_params` parameters, if the config
    does not set it.

    >>> [choose_part_elements(params) for params in (150_000_000, 1_240_000_000, 70_000_000_000)]
    [1048576, 2097152, 4194304]
    """
    return next(elements for least, elements in PART_ELEMENTS if num_params >= least)


def part_length(
    num_elements: int, part_elements: int, block_elements: int, num_islands: int = 1
) -> int:
    """Return the number of elements of every part but the last: a multiple of `block_elements`, and
    at least one block.

    >>> sizes = (1000, 50_000, 10**6, 10**7, 10**8)
    >>> [-(-n // part_length(n, 1 << 20, 256, num_islands=4)) for n in sizes]
    [4, 8, 8, 16, 96]
    """
    base = MIN_PARTS if num_elements >= MIN_PARTS * SMALL_PART_ELEMENTS else SMALL_MIN_PARTS
    base = max(base, 1 << (num_islands - 1).bit_length())
    num_parts = -(-num_elements // (part_elements * base)) * base
    blocks = min(
        -(-num_elements // (max(num_parts, 1) * block_elements)), part_elements // block_elements
    )
    return max(blocks, 1) * block_elements


def equal_length(num_elements: int, part_elements: int, block_elements: int) -> int:
    """Return the number of elements of every part but the last, if there are as few parts as
    possible: a multiple of `block_elements`.

    >>> equal_length(1000, 600, 1), equal_length(1000, 600, 256), equal_length(100, 600, 256)
    (500, 512, 256)
    """
    num_parts = -(
        -num_elements // max(part_elements // block_elements * block_elements, block_elements)
    )
    return -(-num_elements // (max(num_parts, 1) * block_elements)) * block_elements
