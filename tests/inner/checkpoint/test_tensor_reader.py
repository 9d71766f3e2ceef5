"""Boxes of chunks are read from the files of any ranks."""

from pathlib import Path

import pytest
import torch
from blake3 import blake3
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from inner.checkpoint.index import FiledChunk, index_bytes, parse_index
from inner.checkpoint.manifest import FileSpec, Manifest
from inner.checkpoint.tensor_reader import Box, _TensorReader, read_tensors
from inner.checkpoint.tensor_writer import HashedFile

WHOLE = torch.arange(6 * 8 * 3, dtype=torch.float64).view(6, 8, 3)
CUTS = {
    "rank-0.tensors": ((0, 4), (0, 8)),
    "rank-1.tensors": ((4, 6), (0, 5)),
    "rank-2.tensors": ((4, 6), (5, 8)),
}
"""Rows and columns that each rank holds."""


def write(folder: Path) -> _TensorReader:
    """Write the tensor in three chunks, each behind 100 bytes of something else, and return its
    reader.
    """
    files = {}
    chunks = []
    for name, ((top, bottom), (left, right)) in CUTS.items():
        chunk = WHOLE[top:bottom, left:right].contiguous()
        with HashedFile(folder / name) as file:
            file.write(memoryview(bytes(100)))
            start = file.write(chunk.view(torch.uint8).numpy().reshape(-1).data)
        files[name] = file.spec
        chunks.append(FiledChunk("w", (top, left, 0), tuple(chunk.shape), name, start))
    saved = {"w": _saved(chunks)}
    return _TensorReader(
        folder, parse_index(index_bytes(saved, chunks), Manifest(1, {}, {}, files))
    )


def _saved(chunks: list[FiledChunk]) -> TensorStorageMetadata:
    boxes = [
        ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in chunks
    ]
    return TensorStorageMetadata(TensorProperties(torch.float64), WHOLE.size(), boxes)


def test_a_tensor_is_put_together_from_the_files_of_three_ranks(tmp_path: Path) -> None:
    reader = write(tmp_path)
    target = torch.zeros_like(WHOLE)
    read_tensors({"w": target}, tmp_path, reader._index, None)
    assert torch.equal(target, WHOLE)


@pytest.mark.parametrize(
    "box", [[(0, 4), (0, 8), (0, 3)], [(1, 2), (0, 8), (0, 3)], [(2, 2), (3, 4), (1, 2)]]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_box_of_a_chunk_is_read(tmp_path: Path, box: Box, dtype: torch.dtype) -> None:
    (top, height), (left, width), (front, depth) = box
    target = torch.zeros(height, width, depth, dtype=dtype)
    write(tmp_path)._read_box(("w", (0, 0, 0)), box, target)
    expected = WHOLE[top : top + height, left : left + width, front : front + depth]
    assert torch.equal(target, expected.to(dtype))


def test_a_written_file_has_its_size_and_hash(tmp_path: Path) -> None:
    with HashedFile(tmp_path / "file") as file:
        assert [file.write(memoryview(b"abc")), file.write(memoryview(bytes(1 << 20)))] == [0, 64]
    raw = (tmp_path / "file").read_bytes()
    assert file.spec == FileSpec(len(raw), blake3=blake3(raw).hexdigest())
    assert raw == b"abc" + bytes(61 + (1 << 20))
