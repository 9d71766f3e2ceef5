"""Write the tensors of a checkpoint, each rank its own shards into one file, which is hashed while
it is written.

    rank-0.tensors   the values of the chunks of rank 0, one after the other, each at a multiple of
                     64 bytes

torch.distributed.checkpoint plans which rank writes which chunks, so that each element is written
once.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan

from inner.checkpoint.collective_errors import run_on_all_ranks
from inner.checkpoint.index import FiledChunk, index_bytes
from inner.checkpoint.manifest import INDEX, FileSpec

ALIGNMENT_BYTES = 64
BLOCK_BYTES = 1 << 18
"""A block is hashed and written while the processor's cache holds it."""


def write_tensors(
    tensors: dict[str, Tensor], partial: Path, group: dist.ProcessGroup
) -> dict[str, FileSpec]:
    """Write the tensors of all ranks and the index into the partial folder, and return the sizes
    and hashes of all files. Every rank of the group must call it; `tensors` are on the CPU.

    All files are on the disk when it returns. Raises the error of the lowest rank on which it
    fails.
    """
    rank = dist.get_rank(group)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(cast(dict[str, Any], tensors), is_coordinator=rank == 0)
    local_plans = run_on_all_ranks(group, planner.create_local_plan)
    # Every rank computes the same plans from the same local plans.
    plans, metadata = planner.create_global_plan(local_plans)
    name = f"rank-{rank}.tensors"
    written = run_on_all_ranks(group, lambda: _write_chunks(partial / name, planner, plans[rank]))
    files = {f"rank-{each}.tensors": spec for each, (spec, _) in enumerate(written)}
    chunks = [chunk for _, of_rank in written for chunk in of_rank if 0 not in chunk.sizes]

    def write_index() -> FileSpec | None:
        if rank != 0:
            return None
        saved: Any = metadata.state_dict_metadata
        with HashedFile(partial / INDEX) as file:
            file.write(memoryview(index_bytes(saved, chunks)))
        return file.spec

    spec, *_ = run_on_all_ranks(group, write_index)
    assert spec is not None, "rank 0 writes the index"
    return files | {INDEX: spec}


def _write_chunks(
    path: Path, planner: DefaultSavePlanner, plan: SavePlan
) -> tuple[FileSpec, list[FiledChunk]]:
    """Write the chunks of a plan into one file."""
    chunks = []
    with HashedFile(path) as file:
        for item in planner.finish_plan(plan).items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor) and item.tensor_data is not None, (
                f"{item.index.fqn} is no tensor"
            )
            values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            start = file.write(values)
            box = item.tensor_data.chunk
            chunks.append(
                FiledChunk(item.index.fqn, tuple(box.offsets), tuple(box.sizes), path.name, start)
            )
    return file.spec, chunks


class HashedFile:
    """A new file that is hashed while it is written. When its context ends without an error, its
    content is on the disk.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._digest = blake3()
        self._size_bytes = 0

    def write(self, values: memoryview) -> int:
        """Append bytes at the next multiple of 64. Returns the place of the first byte."""
        start = -(-self._size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        padding = memoryview(bytes(start - self._size_bytes))
        for block in (padding, *_blocks(values)):
            self._digest.update(block)
            self._file.write(block)
        self._size_bytes = start + len(values)
        return start

    @property
    def spec(self) -> FileSpec:
        """Size and hash of what was written."""
        return FileSpec(self._size_bytes, blake3=self._digest.hexdigest())

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *args: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def _blocks(values: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(values), BLOCK_BYTES):
        yield values[begin : begin + BLOCK_BYTES]
