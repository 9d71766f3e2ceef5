"""Read the tensors of a checkpoint into memory that the caller has allocated, each rank its own
shards.

torch.distributed.checkpoint plans which rank reads which chunks. The reader here takes the checked
index, and reads the values of a chunk straight into the tensor that wants them.

In format 1 a chunk is an archive of torch.save. It is read with `torch.load(weights_only=True)`,
which builds tensors and calls nothing else, after a check that it is stored uncompressed, so a
chunk cannot take more memory than its bytes in the file.
"""

import io
import zipfile
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType

from inner.checkpoint.collective_errors import run_on_all_ranks
from inner.checkpoint.index import ChunkKey, Index
from inner.checkpoint.pickled_index import Shape
from inner.errors import InputError
from inner.foreign.files import open_file

Box = list[tuple[int, int]]
"""For each dimension the first element and the number of elements."""


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written or read. Older checkpoints are unchanged."""


def read_tensors(
    tensors: dict[str, Tensor], path: Path, index: Index, group: dist.ProcessGroup | None
) -> None:
    """Fill `tensors` from the checkpoint at `path`. Every rank of the group must call it; None is a
    single process.

    Raises InputError if the files hold something other than the index says, CheckpointFailed if
    they cannot be read.
    """

    def read() -> None:
        _TensorReader(path, index).read(tensors)

    try:
        if group is None:
            read()
        else:
            run_on_all_ranks(group, read)
    except InputError:
        raise
    except Exception as error:
        raise CheckpointFailed(f"{path}: was not loaded: {describe(error)}") from error


def describe(error: Exception) -> str:
    """Return one line with the error and the rank that raised it."""
    return " ".join([repr(error), *getattr(error, "__notes__", [])])


class _TensorReader:
    """Reads chunks of one checkpoint."""

    def __init__(self, path: Path, index: Index) -> None:
        self._path = path
        self._index = index

    def read(self, tensors: dict[str, Tensor]) -> None:
        """Fill this rank's shards. Raises InputError if a chunk is not what the index says."""
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(cast(dict[str, Any], tensors), Metadata(dict(self._index.tensors)))
        for item in planner.finish_plan(planner.create_local_plan()).items:
            assert item.type is LoadItemType.TENSOR, "the index holds tensors only"
            target = planner.resolve_tensor(item).detach()
            key = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            box = list(zip(item.storage_offsets, item.lengths, strict=True))
            if self._index.is_raw:
                self._read_box(key, box, target)
            else:
                target.copy_(_cut(self._load_archive(key), box))
            planner.commit_tensor(item, target)

    def _read_box(self, key: ChunkKey, box: Box, target: Tensor) -> None:
        """Fill `target` with a box of a chunk. Only the rows of the box are read."""
        dtype = self._index.tensors[key[0]].properties.dtype
        shape = list(self._shape(key))
        start = self._index.places[key].start
        if box:
            (first_row, shape[0]), box[0] = box[0], (0, box[0][1])
            start += first_row * prod(shape[1:]) * dtype.itemsize
        is_whole = box == [(0, size) for size in shape]
        is_direct = (
            is_whole
            and target.device.type == "cpu"
            and target.dtype == dtype
            and target.is_contiguous()
        )
        rows = target if is_direct else torch.empty(shape, dtype=dtype)
        self._read_bytes(self._path / self._index.places[key].file, start, rows)
        if not is_direct:
            target.copy_(_cut(rows, box))

    def _read_bytes(self, path: Path, start: int, rows: Tensor) -> None:
        """Fill a contiguous CPU tensor with the bytes of a file from `start`. Raises InputError."""
        values = rows.reshape(-1).view(torch.uint8).numpy().data
        try:
            with open_file(path) as file:
                file.seek(start)
                num_read = file.readinto(values)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        if num_read != len(values):
            raise InputError(f"{path}: damaged: it has become shorter since it was checked")

    def _shape(self, key: ChunkKey) -> Shape:
        # Several chunks may begin at the same offsets, but at most one of them has elements, and
        # only that one is read.
        chunks = self._index.tensors[key[0]].chunks
        return next(
            chunk.sizes for chunk in chunks if chunk.offsets == key[1] and 0 not in chunk.sizes
        )

    def _load_archive(self, key: ChunkKey) -> Tensor:
        """Load a chunk of format 1. Raises InputError if it is not what the index says."""
        name, _ = key
        saved = self._index.tensors[name]
        place = self._index.places[key]
        path = self._path / place.file
        try:
            with open_file(path) as file:
                file.seek(place.start)
                chunk = load_chunk(file.read(place.length))
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        except Exception as error:  # noqa: BLE001 - torch and zipfile raise many types for other bytes than a saved tensor
            # Leave out the text of torch's error: it recommends running the code in the file.
            cause = str(error) if type(error) is ValueError else type(error).__name__
            raise InputError(
                f"{path}: refused: the bytes of {name} are not a saved tensor ({cause}), and "
                "nothing in them was run; "
                "use a checkpoint from a source that you trust"
            ) from None
        if (
            chunk.shape != self._shape(key)
            or chunk.dtype != saved.properties.dtype
            or chunk.layout != torch.strided
        ):
            raise InputError(
                f"{path}: refused: {name} has a shape or dtype other than the index says"
            )
        return chunk


def _cut(chunk: Tensor, box: Box) -> Tensor:
    """Return a box of a chunk."""
    for dim, (start, length) in enumerate(box):
        chunk = chunk.narrow(dim, start, length)
    return chunk


def load_chunk(saved: bytes) -> Tensor:
    """Load a tensor from bytes that torch.save wrote. For other bytes, raises ValueError or an
    error of torch or zipfile.

    It allocates no more memory than the length of `saved`, because it accepts only uncompressed
    data.
    """
    stream = io.BytesIO(saved)
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("it is compressed")
    stream.seek(0)
    tensor = torch.load(stream, map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor):
        raise ValueError(f"it is a {type(tensor).__name__}")
    return tensor.detach()
