"""Read the tensors of a checkpoint into memory that the caller has allocated, each rank its own
shards.

torch.distributed.checkpoint plans which rank reads which chunks. Its own reader runs the pickles in
the files. The reader here takes the checked index, and reads each chunk with
`torch.load(weights_only=True)`, which builds tensors and calls nothing else. It first checks that
the chunk is stored uncompressed, so a chunk cannot take more memory than its bytes in the file.
"""

import io
import warnings
import zipfile
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from inner.checkpoint.index import Index
from inner.errors import InputError
from inner.foreign.files import open_file


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written or read. Older checkpoints are unchanged."""


def read_tensors(tensors: dict[str, Tensor], path: Path, index: Index, group: dist.ProcessGroup | None) -> None:
    """Fill `tensors` from the checkpoint at `path`. Every rank of the group must call it; None is a
    single process.

    Raises InputError if the files hold something other than the index says, CheckpointFailed if
    they cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(
                cast(dict[str, Any], tensors),
                storage_reader=TensorReader(path, index),
                planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        _, (first, _) = next(iter(error.failures.items()))
        if isinstance(first, InputError):
            raise first from error
        raise CheckpointFailed(f"{path}: was not loaded: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Return one line with the error and the rank that raised it."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {first!r}"
    return " ".join([repr(error), *getattr(error, "__notes__", [])])


class TensorReader(StorageReader):
    """The reader that torch.distributed.checkpoint calls to load a checkpoint."""

    def __init__(self, path: Path, index: Index) -> None:
        self._path = path
        self._index = index

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Do nothing: this reader has no state to reset."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the shapes in the index."""
        return Metadata(dict(self._index.tensors))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: this reader needs no preparation."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all chunks that the plan assigns to this rank. Raises InputError if a chunk is not
        what the index says.
        """
        for item in plan.items:
            assert item.type is LoadItemType.TENSOR, "the index holds tensors only"
            name = item.storage_index.fqn
            offsets = item.storage_index.offset
            chunk = self._read_chunk(name, tuple(offsets or ()))
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                chunk = chunk.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(chunk)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_chunk(self, name: str, offsets: tuple[int, ...]) -> Tensor:
        saved = self._index.tensors[name]
        place = self._index.places[name, offsets]
        path = self._path / place.file
        # Several chunks may begin at the same offsets, but at most one of them has elements, and
        # only that one is read.
        shape = next(chunk.sizes for chunk in saved.chunks if chunk.offsets == offsets and 0 not in chunk.sizes)
        try:
            with open_file(path) as file:
                file.seek(place.offset)
                chunk = load_chunk(file.read(place.length))
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        except Exception as error:  # noqa: BLE001 - torch and zipfile raise many types for other bytes than a saved tensor
            # Leave out the text of torch's error: it recommends running the code in the file.
            cause = str(error) if type(error) is ValueError else type(error).__name__
            raise InputError(
                f"{path}: refused: the bytes of {name} are not a saved tensor ({cause}), and nothing in them was run; "
                "use a checkpoint from a source that you trust"
            ) from None
        if chunk.shape != shape or chunk.dtype != saved.properties.dtype or chunk.layout != torch.strided:
            raise InputError(f"{path}: refused: {name} has a shape or dtype other than the index says")
        return chunk

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Return True: any folder may hold a checkpoint."""
        return True


def load_chunk(saved: bytes) -> Tensor:
    """Load a tensor from bytes that torch.save wrote. For other bytes, raises ValueError or an error of torch
    or zipfile.

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
