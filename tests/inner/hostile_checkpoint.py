"""What somebody who can write to a folder of checkpoints may put there: pickles that make a file
when they are run.
"""

import io
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from inner.checkpoint.manifest import FORMER_INDEX
from tests.inner.former_checkpoint import to_former_format, write_fitting_manifest


class Runs:
    """Makes the file `marker` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._marker), "w")


def poison(checkpoint: Path, how: str, marker: Path) -> None:
    """Put a whole checkpoint into format 1, replace a part of it by something hostile, and write a
    manifest that fits.
    """
    if not (checkpoint / FORMER_INDEX).exists():
        to_former_format(checkpoint)
    if how in WHOLE:
        (checkpoint / FORMER_INDEX).write_bytes(WHOLE[how](marker))
    else:
        metadata = pickle.loads((checkpoint / FORMER_INDEX).read_bytes())
        CHANGES[how](metadata, checkpoint, marker)
        (checkpoint / FORMER_INDEX).write_bytes(pickle.dumps(metadata))
    write_fitting_manifest(checkpoint)


def _wanted(metadata: Metadata) -> str:
    """Name of the tensor that every reader wants: one of the global params, or else of the
    params.
    """
    names = [
        name
        for name in metadata.state_dict_metadata
        if name.startswith(("outer/params/", "params/"))
    ]
    return min(names, key=lambda name: not name.startswith("outer/"))


def _write_chunk(metadata: Metadata, checkpoint: Path, content: bytes) -> None:
    """Put other bytes in place of a tensor's first chunk, at the end of the file."""
    name = _wanted(metadata)
    key = next(index for index in metadata.storage_data if index.fqn == name)
    info = metadata.storage_data[key]
    file = checkpoint / info.relative_path
    metadata.storage_data[key] = replace(info, offset=file.stat().st_size, length=len(content))
    file.write_bytes(file.read_bytes() + content)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def put_code_for_bytes(metadata: Metadata, checkpoint: Path, marker: Path) -> None:
    """The index calls a tensor an object, which torch's reader unpickles."""
    name = _wanted(metadata)
    _write_chunk(metadata, checkpoint, _saved(Runs(marker)))
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    key = next(index for index in metadata.storage_data if index.fqn == name)
    metadata.storage_data[MetadataIndex(name)] = metadata.storage_data.pop(key)


def put_code_for_tensor(metadata: Metadata, checkpoint: Path, marker: Path) -> None:
    """As many bytes as a tensor, and code among them."""
    _write_chunk(metadata, checkpoint, _saved([Runs(marker), torch.zeros(1 << 14)]))


def put_code_beside(metadata: Metadata, checkpoint: Path, marker: Path) -> None:
    """A good index with something more that nobody reads."""
    metadata.planner_data = Runs(marker)


def name_file_outside(metadata: Metadata, checkpoint: Path, marker: Path) -> None:
    for key, info in metadata.storage_data.items():
        metadata.storage_data[key] = replace(
            info, relative_path=f"../{checkpoint.name}/{info.relative_path}"
        )


def ask_for_memory(metadata: Metadata, checkpoint: Path, marker: Path) -> None:
    """A tensor of 4 TB in a file of some kB."""
    saved = metadata.state_dict_metadata[_wanted(metadata)]
    size = torch.Size([1 << 40])
    saved.size, saved.chunks = size, [ChunkStorageMetadata(torch.Size([0]), size)]


def repeat_a_chunk(metadata: Metadata, checkpoint: Path, marker: Path) -> None:
    """A tensor that consists of one chunk many times."""
    saved = metadata.state_dict_metadata[_wanted(metadata)]
    saved.size = torch.Size([saved.size[0] * 50, *saved.size[1:]])
    saved.chunks = saved.chunks * 50


def compress_a_chunk(metadata: Metadata, checkpoint: Path, marker: Path) -> None:
    """A saved tensor whose zeros are deflated: memory for it grows a thousand times when it is
    read.
    """
    shrunk = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(_saved(torch.zeros(1 << 20)))) as archive,
        zipfile.ZipFile(shrunk, "w", zipfile.ZIP_DEFLATED) as deflated,
    ):
        for name in archive.namelist():
            deflated.writestr(name, archive.read(name))
    _write_chunk(metadata, checkpoint, shrunk.getvalue().ljust(1 << 16, b"\0"))


def put_other_shape(metadata: Metadata, checkpoint: Path, marker: Path) -> None:
    _write_chunk(metadata, checkpoint, _saved(torch.zeros(70000, 3, 5)))


WHOLE: dict[str, Callable[[Path], bytes]] = {
    "code as the index": lambda marker: pickle.dumps(Runs(marker)),
    "old instructions": lambda marker: pickle.dumps(Runs(marker), protocol=0),
    "no pickle": lambda marker: b"\x80\x04not an index",
    "half a pickle": lambda marker: pickle.dumps(Metadata({}))[:-20],
}
CHANGES: dict[str, Callable[[Metadata, Path, Path], None]] = {
    "code beside the index": put_code_beside,
    "code for an object": put_code_for_bytes,
    "code for a tensor": put_code_for_tensor,
    "a file outside": name_file_outside,
    "a huge tensor": ask_for_memory,
    "a repeated chunk": repeat_a_chunk,
    "a compressed chunk": compress_a_chunk,
    "another shape": put_other_shape,
}
CODE = ["code as the index", "old instructions", "code beside the index", "code for an object"]
"""Those that make a file where torch.distributed.checkpoint reads them."""
REFUSALS = {
    "code as the index": "refused: it names",
    "old instructions": "refused: it has the instruction",
    "no pickle": "refused: not a pickle of plain data",
    "half a pickle": "refused: ",
    "code beside the index": "refused: it names",
    "code for an object": r"refused: it names "
    r"torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "code for a tensor": r"refused: the bytes of \S+ are not a saved tensor",
    "a file outside": "refused: it names the file '../step-",
    "a huge tensor": "has fewer bytes than its shape",
    "a repeated chunk": "do not add up to its shape",
    "a compressed chunk": "are not a saved tensor .*compressed",
    "another shape": "has a shape or dtype other than the index says",
}
"""What each one is refused with."""
