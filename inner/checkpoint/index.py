"""The index of a checkpoint: the shape and dtype of every tensor, and the file and place of each of
its chunks.

    index.json   {"tensors": {"params/embed.weight": {
                     "dtype": "float32", "shape": [61, 32],
                     "chunks": [{"file": "rank-0.tensors", "start": 0, "offsets": [0, 0], "sizes":
                     [61, 32]}]}}}

A chunk is a box of a tensor, row by row; `start` is its first byte in the file. Another program may
have written the index: every value is checked against the files that the manifest names before any
memory is allocated for a tensor. Format 1 has another index (pickled_index.py).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from inner.checkpoint.folder import SavedCheckpoint, hash_bytes, read_part
from inner.checkpoint.manifest import FORMER_INDEX, INDEX, Manifest
from inner.checkpoint.pickle_parser import PickleError
from inner.checkpoint.pickled_index import (
    DTYPES,
    MAX_DIMS,
    MAX_SIZE,
    ListedChunk,
    Shape,
    parse_pickled_index,
)
from inner.errors import InputError
from inner.foreign.text import parse_json

MAX_INDEX_BYTES = 1 << 28
MAX_EXTRA_BYTES = 1 << 16
"""In format 1 each chunk's header is larger than its entry in the index, so an index that is longer
than the files that it lists, and this number, has been forged."""

ChunkKey = tuple[str, Shape]
"""Name of a tensor, and the offsets at which a chunk begins in that tensor."""
Tensors = Mapping[str, TensorStorageMetadata]


class IndexRefused(ValueError):
    """An index describes something other than tensors in the files of its manifest."""


@dataclass(frozen=True)
class ChunkPlace:
    """The place of a chunk in a file."""

    file: str
    start: int
    """Its first byte."""
    length: int
    """Number of bytes."""


@dataclass(frozen=True)
class FiledChunk:
    """A chunk of a tensor, and its place."""

    name: str
    offsets: Shape
    sizes: Shape
    file: str
    start: int


@dataclass(frozen=True)
class Index:
    """The tensors of a checkpoint, and the places of their chunks."""

    tensors: dict[str, TensorStorageMetadata]
    places: dict[ChunkKey, ChunkPlace]
    is_raw: bool
    """Whether a place holds the values of its chunk and nothing else. In format 1 it holds an
    archive of torch.save.
    """


def read_index(checkpoint: SavedCheckpoint) -> Index:
    """Read and check the index of a checkpoint. Raises InputError."""
    files = checkpoint.manifest.files
    name = next((each for each in (INDEX, FORMER_INDEX) if each in files), None)
    if name is None:
        raise InputError(
            f"{checkpoint.path}: its manifest names no {INDEX}; restore the checkpoint, or use "
            "another"
        )
    path = checkpoint.path / name
    spec = files[name]
    others = sum(other.size_bytes for each, other in files.items() if each != name)
    most_bytes = MAX_INDEX_BYTES if name == INDEX else MAX_EXTRA_BYTES + others
    if spec.size_bytes > most_bytes:
        raise InputError(
            f"{path}: {spec.size_bytes} bytes, more than the tensors that it lists; at most "
            f"{most_bytes} are read; use another checkpoint"
        )
    raw = read_part(path, spec.size_bytes)
    # Hash the file again: these bytes are parsed, and the file may have changed since it was
    # checked.
    if hash_bytes(raw, spec) != spec.hash:
        raise InputError(f"{path}: damaged: its content has changed since it was written")
    try:
        return (
            parse_index(raw, checkpoint.manifest)
            if name == INDEX
            else parse_former(raw, checkpoint.manifest)
        )
    except (PickleError, IndexRefused) as error:
        raise InputError(
            f"{path}: refused: {error}. It is not an index that this program or "
            "torch.distributed.checkpoint has "
            "written for tensors, and nothing in it was run; use a checkpoint from a source that "
            "you trust"
        ) from None


def parse_index(raw: bytes, manifest: Manifest) -> Index:
    """Parse the content of index.json. Raises IndexRefused if it describes anything except tensors
    in the manifest's files.
    """
    try:
        values = parse_json(raw)
    except ValueError as error:
        raise IndexRefused(f"not JSON ({error})") from None
    listed = _dict(_dict(values).get("tensors"))
    tensors = {name: _tensor(name, value) for name, value in listed.items()}
    chunks = [
        _place(name, chunk, tensors[name].properties.dtype)
        for name, value in listed.items()
        for chunk in value["chunks"]
    ]
    return _checked(tensors, chunks, manifest, is_raw=True)


def parse_former(raw: bytes, manifest: Manifest) -> Index:
    """Parse the content of `.metadata`, the index in format 1. Raises PickleError and
    IndexRefused.
    """
    tensors, chunks = parse_pickled_index(raw)
    return _checked(tensors, chunks, manifest, is_raw=False)


def index_bytes(tensors: Tensors, chunks: Iterable[FiledChunk]) -> bytes:
    """Return the content of index.json. Raises InputError if it would be too long to be read."""
    values = {
        name: {
            "dtype": str(saved.properties.dtype).removeprefix("torch."),
            "shape": list(saved.size),
            "chunks": [],
        }
        for name, saved in tensors.items()
    }
    for chunk in chunks:
        place = {
            "file": chunk.file,
            "start": chunk.start,
            "offsets": chunk.offsets,
            "sizes": chunk.sizes,
        }
        values[chunk.name]["chunks"].append(place)
    raw = json.dumps({"tensors": values}).encode()
    if len(raw) > MAX_INDEX_BYTES:
        raise InputError(
            f"{len(tensors)} tensors need an index of {len(raw)} bytes; at most {MAX_INDEX_BYTES} "
            "are read"
        )
    return raw


def _checked(
    tensors: dict[str, TensorStorageMetadata],
    chunks: Iterable[ListedChunk],
    manifest: Manifest,
    *,
    is_raw: bool,
) -> Index:
    places = _check_places(chunks, manifest)
    for name, saved in tensors.items():
        _check_chunks(name, saved, places)
    return Index(tensors, places, is_raw)


def _check_places(chunks: Iterable[ListedChunk], manifest: Manifest) -> dict[ChunkKey, ChunkPlace]:
    """Return the place of each chunk. Raises IndexRefused if the chunks of a file have more bytes
    than the file.
    """
    left = {
        name: spec.size_bytes
        for name, spec in manifest.files.items()
        if name not in (INDEX, FORMER_INDEX)
    }
    places = {}
    for name, offsets, file, start, length in chunks:
        if file not in left:
            raise IndexRefused(f"it names the file {file!r:.100}, which is not in the manifest")
        left[file] -= length
        if left[file] < 0 or start + length > manifest.files[file].size_bytes:
            raise IndexRefused(f"it places more bytes in {file!r} than the file has")
        places[name, offsets] = ChunkPlace(file, start, length)
    return places


def _check_chunks(
    name: str, saved: TensorStorageMetadata, places: Mapping[ChunkKey, ChunkPlace]
) -> None:
    """Raise IndexRefused if a tensor's chunks do not add up to it, or a place has too few bytes."""
    for chunk in saved.chunks:
        _check_fits(chunk, saved.size)
    # Chunks without elements are not counted: one listed many times could otherwise stand for a
    # tensor of any size.
    filled = [chunk for chunk in saved.chunks if prod(chunk.sizes)]
    whole = sum(prod(chunk.sizes) for chunk in filled)
    if len({chunk.offsets for chunk in filled}) != len(filled) or whole != prod(saved.size):
        raise IndexRefused(
            f"the chunks of {name!r:.100} do not add up to its shape {tuple(saved.size)}"
        )
    for chunk in saved.chunks:
        place = places.get((name, tuple(chunk.offsets)))
        if place is None or place.length < prod(chunk.sizes) * saved.properties.dtype.itemsize:
            sizes = tuple(chunk.sizes)
            raise IndexRefused(
                f"a chunk of {name!r:.100} has fewer bytes than its shape {sizes} needs"
            )


def _check_fits(chunk: ChunkStorageMetadata, shape: Shape) -> None:
    offsets = chunk.offsets
    sizes = chunk.sizes
    fits = all(
        offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape, strict=False)
    )
    if not len(offsets) == len(sizes) == len(shape) or not fits:
        raise IndexRefused(
            f"a chunk of {tuple(sizes)} at {tuple(offsets)} lies outside its tensor {tuple(shape)}"
        )


def _tensor(name: str, value: Any) -> TensorStorageMetadata:
    fields = _dict(value)
    dtype = DTYPES.get(f"torch.{fields.get('dtype')}")
    chunks = fields.get("chunks")
    if dtype is None or not isinstance(chunks, list):
        raise IndexRefused(f"{name!r:.100} has no known dtype, or no list of chunks")
    found = [
        ChunkStorageMetadata(_size(_dict(chunk).get("offsets")), _size(chunk.get("sizes")))
        for chunk in chunks
    ]
    return TensorStorageMetadata(TensorProperties(dtype), _size(fields.get("shape")), found)


def _place(name: str, chunk: dict[str, Any], dtype: torch.dtype) -> ListedChunk:
    file = chunk.get("file")
    start = chunk.get("start")
    if not isinstance(file, str) or not _is_count(start):
        raise IndexRefused(f"a chunk of {name!r:.100} has no file or no place in it")
    return name, tuple(chunk["offsets"]), file, start, prod(chunk["sizes"]) * dtype.itemsize


def _size(value: Any) -> torch.Size:
    if not isinstance(value, list) or len(value) > MAX_DIMS or not all(map(_is_count, value)):
        raise IndexRefused(f"it holds {value!r:.100} where a list of sizes is expected")
    return torch.Size(value)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= MAX_SIZE


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise IndexRefused(f"it holds {value!r:.100} where an object is expected")
    return value
