"""Megatron's indexed files: NAME.bin has the ids; NAME.idx has their type, the length of each
sequence, and the documents. NAME.idx consists of:

9 bytes MMIDIDX\\0\\0, uint64 version 1, uint8 type, uint64 number of sequences, uint64 number of
documents + 1, int32 length of each sequence, int64 offset of each sequence in bytes, int64 first
sequence of each document, end
"""

import struct
from pathlib import Path

import numpy as np

from inner.data.token_files.token_file import TokenFile, check_ends, map_ids, refuse

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


def open_megatron(path: Path) -> TokenFile:
    """Open NAME.bin with its NAME.idx. Raises InputError if they are damaged or do not belong
    together.
    """
    index = path.with_suffix(".idx")
    if not index.is_file():
        refuse(path, f"there is no {index.name} beside it, which a .bin file of Megatron needs")
    raw = np.memmap(index, dtype=np.uint8, mode="r")
    if len(raw) < HEADER.size:
        refuse(index, f"it has {len(raw)} bytes, too few for a header")
    magic, version, code, num_sequences, num_bounds = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC or version != 1 or code not in TYPES:
        refuse(
            index,
            "it is not an index of Megatron, version 1, for integer ids (it begins with "
            f"{magic!r})",
        )
    expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if len(raw) != expected:
        refuse(index, f"it has {len(raw)} bytes, but {num_sequences} sequences need {expected}")
    sizes = np.frombuffer(raw, np.int32, num_sequences, HEADER.size).astype(np.int64)
    bounds = np.frombuffer(raw, np.int64, num_bounds, HEADER.size + 12 * num_sequences)
    if (
        num_bounds < 2
        or bounds[0] != 0
        or bounds[-1] != num_sequences
        or bool((np.diff(bounds) < 0).any())
    ):
        refuse(index, f"its documents do not cover its {num_sequences} sequences")
    starts = np.append(0, np.cumsum(sizes))
    check_ends(index, starts[bounds[1:]], int(starts[-1]))
    return TokenFile(
        path, map_ids(path, np.dtype(TYPES[code]), int(starts[-1])), starts[bounds[1:]]
    )
