"""The index of a checkpoint: the shape and dtype of every tensor, and the file and offset of each
of its chunks.

torch.distributed.checkpoint pickles its index into the file `.metadata`. Another program may have
written that file, so it is parsed without running the pickle. Every value is checked against the
files that the manifest names before any memory is allocated for a tensor.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from inner.checkpoint.folder import SavedCheckpoint, read_part
from inner.checkpoint.manifest import INDEX, Manifest
from inner.checkpoint.pickle_parser import Call, Name, Pairs, PickleError, parse_pickle
from inner.errors import InputError

DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
METADATA = "torch.distributed.checkpoint.metadata."
FILESYSTEM = "torch.distributed.checkpoint.filesystem."
KNOWN = {
    *DTYPES,
    "torch.Size",
    "torch.serialization._get_layout",
    f"{FILESYSTEM}_StorageInfo",
    *(
        METADATA + name
        for name in (
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
            "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
    # The folder that the checkpoint was written to. Nothing here uses it.
    "pathlib.PosixPath", "pathlib._local.PosixPath",
}  # fmt: skip
"""All classes and functions that an index may name."""
MAX_DIMS = 8
MAX_SIZE = 1 << 48
# Each chunk's header in the data files is larger than its entry in the index, so an index that is
# longer than the files that it lists has been forged.
MAX_EXTRA_BYTES = 1 << 16
BYTES_PER_CHUNK = 8
"""Each chunk takes more bytes of an index than this number."""

Shape = tuple[int, ...]
ChunkKey = tuple[str, Shape]
"""Name of a tensor, and the offsets at which a chunk begins in that tensor."""


@dataclass(frozen=True)
class ChunkPlace:
    """The place of a chunk in a file."""

    file: str
    offset: int
    length: int
    """Number of bytes."""


@dataclass(frozen=True)
class Index:
    """The tensors of a checkpoint, and the places of their chunks."""

    tensors: dict[str, TensorStorageMetadata]
    places: dict[ChunkKey, ChunkPlace]


def read_index(checkpoint: SavedCheckpoint) -> Index:
    """Read and check the index of a checkpoint. Raises InputError."""
    path = checkpoint.path / INDEX
    files = checkpoint.manifest.files
    spec = files.get(INDEX)
    if spec is None:
        raise InputError(f"{checkpoint.path}: its manifest names no {INDEX}; restore the checkpoint, or use another")
    if spec.size_bytes > MAX_EXTRA_BYTES + sum(other.size_bytes for name, other in files.items() if name != INDEX):
        raise InputError(
            f"{path}: {spec.size_bytes} bytes, more than the tensors that it lists; use another checkpoint"
        )
    raw = read_part(path, spec.size_bytes)
    # Hash the file again: these bytes are parsed, and the file may have changed since it was
    # checked.
    if hashlib.sha256(raw).hexdigest() != spec.sha256:
        raise InputError(f"{path}: damaged: its content has changed since it was written")
    try:
        return parse_index(raw, checkpoint.manifest)
    except PickleError as error:
        raise InputError(
            f"{path}: refused: {error}. It is not an index that this program or torch.distributed.checkpoint has "
            "written for tensors, and nothing in it was run; use a checkpoint from a source that you trust"
        ) from None


def parse_index(raw: bytes, manifest: Manifest) -> Index:
    """Parse the content of `.metadata`. Raises PickleError if it describes anything except tensors
    in the manifest's files.
    """
    metadata = _attributes(parse_pickle(raw, KNOWN), METADATA + "Metadata")
    places = dict(_places(_pairs(metadata.get("storage_data")), manifest))
    tensors: dict[str, TensorStorageMetadata] = {}
    chunks_left = len(raw) // BYTES_PER_CHUNK
    for name, value in _pairs(metadata.get("state_dict_metadata")):
        tensors[_text(name)] = _tensor(name, value, places, chunks_left)
        chunks_left -= len(tensors[name].chunks)
    return Index(tensors, places)


def _tensor(name: str, value: Any, places: Mapping[ChunkKey, ChunkPlace], most_chunks: int) -> TensorStorageMetadata:
    fields = _attributes(value, METADATA + "TensorStorageMetadata")
    dtype = _dtype(fields.get("properties"))
    shape = _size(fields.get("size"))
    chunks = fields.get("chunks")
    if not isinstance(chunks, list) or len(chunks) > most_chunks:
        raise PickleError(f"{name!r} has no list of chunks, or too long a list")
    found = [_chunk(each, shape) for each in chunks]
    # Chunks without elements are not counted: one listed many times could otherwise stand for a
    # tensor of any size.
    filled = [chunk for chunk in found if prod(chunk.sizes)]
    if len({chunk.offsets for chunk in filled}) != len(filled) or sum(prod(c.sizes) for c in filled) != prod(shape):
        raise PickleError(f"the chunks of {name!r} do not add up to its shape {tuple(shape)}")
    for chunk in found:
        place = places.get((name, tuple(chunk.offsets)))
        if place is None or place.length < prod(chunk.sizes) * dtype.itemsize:
            raise PickleError(f"a chunk of {name!r} has fewer bytes than its shape {tuple(chunk.sizes)} needs")
    return TensorStorageMetadata(TensorProperties(dtype), shape, found)


def _chunk(value: Any, shape: Shape) -> ChunkStorageMetadata:
    fields = _attributes(value, METADATA + "ChunkStorageMetadata")
    offsets = _size(fields.get("offsets"))
    sizes = _size(fields.get("sizes"))
    fits = all(offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape, strict=False))
    if not len(offsets) == len(sizes) == len(shape) or not fits:
        raise PickleError(f"a chunk of {tuple(sizes)} at {tuple(offsets)} lies outside its tensor {tuple(shape)}")
    return ChunkStorageMetadata(offsets, sizes)


def _places(pairs: Iterable[tuple[Any, Any]], manifest: Manifest) -> Iterator[tuple[ChunkKey, ChunkPlace]]:
    """Yield the place of each chunk. Raises PickleError if the chunks of a file have more bytes
    than the file.
    """
    left = {name: spec.size_bytes for name, spec in manifest.files.items() if name != INDEX}
    for key, value in pairs:
        chunk = _attributes(key, METADATA + "MetadataIndex")
        info = _attributes(value, FILESYSTEM + "_StorageInfo")
        file = _text(info.get("relative_path"))
        offset = _count(info.get("offset"))
        length = _count(info.get("length"))
        if file not in left:
            raise PickleError(f"it names the file {file!r}, which is not in the manifest")
        if info.get("transform_descriptors"):
            raise PickleError(f"{file!r} is transformed; only plain files are read")
        left[file] -= length
        if left[file] < 0 or offset + length > manifest.files[file].size_bytes:
            raise PickleError(f"it places more bytes in {file!r} than the file has")
        yield (_text(chunk.get("fqn")), tuple(_size(chunk.get("offset")))), ChunkPlace(file, offset, length)


def _attributes(value: Any, kind: str) -> dict[str, Any]:
    """Return the attributes of an object of the class `kind`. Raises PickleError if `value` is not
    such an object.
    """
    if not isinstance(value, Call) or value.function != kind or value.args != ():
        raise PickleError(f"it holds {_describe(value)} where {kind} is expected")
    return {_text(name): attribute for name, attribute in _pairs(value.state)}


def _dtype(properties: Any) -> torch.dtype:
    kind = METADATA + "TensorProperties"
    if not isinstance(properties, Call) or properties.function != kind or not isinstance(properties.state, tuple):
        raise PickleError(f"it holds {_describe(properties)} where {kind} is expected")
    dtype = properties.state[0] if properties.state else None
    if not isinstance(dtype, Name) or dtype.text not in DTYPES:
        raise PickleError(f"it holds {_describe(dtype)} where a dtype is expected")
    return DTYPES[dtype.text]


def _size(value: Any) -> torch.Size:
    numbers = value.args[0] if isinstance(value, Call) and value.function == "torch.Size" and value.args else None
    if not isinstance(numbers, tuple) or len(numbers) > MAX_DIMS:
        raise PickleError(f"it holds {_describe(value)} where torch.Size is expected")
    return torch.Size([_count(number) for number in numbers])


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_SIZE:
        raise PickleError(f"it holds {_describe(value)} where a size is expected")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise PickleError(f"it holds {_describe(value)} where a name is expected")
    return value


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, Pairs):
        raise PickleError(f"it holds {_describe(value)} where a dict is expected")
    return value.items


def _describe(value: Any) -> str:
    """Return a short description of a value from a pickle, for error messages."""
    if isinstance(value, Call):
        return f"a call of {value.function[:100]}"
    if isinstance(value, Name):
        return f"the name {value.text[:100]}"
    return f"{value!r:.100}" if isinstance(value, int | str | None) else f"a {type(value).__name__}"
