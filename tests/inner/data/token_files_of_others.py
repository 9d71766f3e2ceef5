"""Writes token files in the formats of other programs, by their published descriptions."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

DOCUMENTS = [
    [*b"first text", 257],
    [*b"second", 257],
    [*b"the third one is longer", 257],
    [*b"end", 257],
] * 30


def write_megatron(
    path: Path, documents: Sequence[Sequence[int]] = DOCUMENTS, dtype: str = "uint16"
) -> Path:
    """NAME.bin and NAME.idx with one sequence a document, as preprocess_data.py --append-eod writes
    them.
    """
    codes = {"uint8": 1, "int32": 4, "uint16": 8}
    ids = np.concatenate([np.array(document, dtype) for document in documents])
    path.with_suffix(".bin").write_bytes(ids.tobytes())
    sizes = np.array([len(document) for document in documents], np.int32)
    offsets = (np.append(0, np.cumsum(sizes)[:-1]) * ids.itemsize).astype(np.int64)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, codes[dtype], len(sizes), len(sizes) + 1)
    bounds = np.arange(len(sizes) + 1, dtype=np.int64)
    path.with_suffix(".idx").write_bytes(
        header + sizes.tobytes() + offsets.tobytes() + bounds.tobytes()
    )
    return path.with_suffix(".bin")


def write_datatrove(
    path: Path, documents: Sequence[Sequence[int]] = DOCUMENTS, dtype: str = "uint16"
) -> Path:
    """NAME.ds and NAME.ds.index."""
    path = path.with_suffix(".ds")
    path.write_bytes(
        np.concatenate([np.array(document, dtype) for document in documents]).tobytes()
    )
    ends = np.cumsum([len(document) for document in documents]).astype(np.uint64)
    path.with_name(f"{path.name}.index").write_bytes(ends.tobytes())
    return path


def write_olmo(
    path: Path, documents: Sequence[Sequence[int]] = DOCUMENTS, dtype: str = "uint16"
) -> Path:
    """NAME.npy without a header."""
    path = path.with_suffix(".npy")
    path.write_bytes(
        np.concatenate([np.array(document, dtype) for document in documents]).tobytes()
    )
    return path


def write_numpy(
    path: Path, documents: Sequence[Sequence[int]] = DOCUMENTS, dtype: str = "int32"
) -> Path:
    """NAME.npy as numpy.save writes it."""
    path = path.with_suffix(".npy")
    np.save(path, np.concatenate([np.array(document, dtype) for document in documents]))
    return path
