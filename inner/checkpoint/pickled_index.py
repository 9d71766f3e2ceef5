"""The index of a checkpoint in format 1: the pickle `.metadata` of torch.distributed.checkpoint.

Another program may have written that file, so it is parsed without running the pickle. index.py
checks what it says against the files.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from inner.checkpoint.pickle_parser import Call, Name, Pairs, PickleError, parse_pickle

DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    )
}
"""The dtypes that a checkpoint may have, in any format, by their full name."""
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
BYTES_PER_CHUNK = 8
"""Each chunk takes more bytes of an index than this number."""

Shape = tuple[int, ...]
ListedChunk = tuple[str, Shape, str, int, int]
"""Name of the tensor, offsets of the chunk in it, and its file, first byte there and length in
bytes.
"""


def parse_pickled_index(raw: bytes) -> tuple[dict[str, TensorStorageMetadata], list[ListedChunk]]:
    """Return the tensors that the index describes, and the places of their chunks, unchecked.

    Raises PickleError if it holds anything else.
    """
    metadata = _attributes(parse_pickle(raw, KNOWN), METADATA + "Metadata")
    tensors: dict[str, TensorStorageMetadata] = {}
    chunks_left = len(raw) // BYTES_PER_CHUNK
    for name, value in _pairs(metadata.get("state_dict_metadata")):
        tensors[_text(name)] = _tensor(name, value, chunks_left)
        chunks_left -= len(tensors[name].chunks)
    return tensors, list(_chunks(metadata.get("storage_data")))


def _tensor(name: str, value: Any, most_chunks: int) -> TensorStorageMetadata:
    fields = _attributes(value, METADATA + "TensorStorageMetadata")
    chunks = fields.get("chunks")
    if not isinstance(chunks, list) or len(chunks) > most_chunks:
        raise PickleError(f"{name!r} has no list of chunks, or too long a list")
    dtype = _dtype(fields.get("properties"))
    return TensorStorageMetadata(
        TensorProperties(dtype), _size(fields.get("size")), [_chunk(each) for each in chunks]
    )


def _chunk(value: Any) -> ChunkStorageMetadata:
    fields = _attributes(value, METADATA + "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(fields.get("offsets")), _size(fields.get("sizes")))


def _chunks(pairs: Any) -> Iterator[ListedChunk]:
    for key, value in _pairs(pairs):
        chunk = _attributes(key, METADATA + "MetadataIndex")
        info = _attributes(value, FILESYSTEM + "_StorageInfo")
        file = _text(info.get("relative_path"))
        if info.get("transform_descriptors"):
            raise PickleError(f"{file!r} is transformed; only plain files are read")
        offsets = tuple(_size(chunk.get("offset")))
        yield (
            _text(chunk.get("fqn")),
            offsets,
            file,
            _count(info.get("offset")),
            _count(info.get("length")),
        )


def _attributes(value: Any, kind: str) -> dict[str, Any]:
    """Return the attributes of an object of the class `kind`. Raises PickleError if `value` is not
    such an object.
    """
    if not isinstance(value, Call) or value.function != kind or value.args != ():
        raise PickleError(f"it holds {_describe(value)} where {kind} is expected")
    return {_text(name): attribute for name, attribute in _pairs(value.state)}


def _dtype(properties: Any) -> torch.dtype:
    kind = METADATA + "TensorProperties"
    if (
        not isinstance(properties, Call)
        or properties.function != kind
        or not isinstance(properties.state, tuple)
    ):
        raise PickleError(f"it holds {_describe(properties)} where {kind} is expected")
    dtype = properties.state[0] if properties.state else None
    if not isinstance(dtype, Name) or dtype.text not in DTYPES:
        raise PickleError(f"it holds {_describe(dtype)} where a dtype is expected")
    return DTYPES[dtype.text]


def _size(value: Any) -> torch.Size:
    numbers = (
        value.args[0]
        if isinstance(value, Call) and value.function == "torch.Size" and value.args
        else None
    )
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
