"""Checkpoints in format 1, with the files of torch.distributed.checkpoint, and manifests that fit
their files.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from blake3 import blake3

from inner.checkpoint.folder import list_published
from inner.checkpoint.index import read_index
from inner.checkpoint.manifest import FORMAT, FORMER_INDEX, MANIFEST, FileSpec
from inner.checkpoint.tensor_reader import read_tensors


def specs_of(folder: Path) -> dict[str, FileSpec]:
    """Sizes and hashes of all files of a checkpoint but its manifest."""
    files = [file for file in folder.iterdir() if file.name != MANIFEST]
    return {file.name: _spec_of(file.read_bytes(), is_former(folder)) for file in files}


def is_former(checkpoint: Path) -> bool:
    return (checkpoint / FORMER_INDEX).exists()


def write_fitting_manifest(checkpoint: Path, **changes: Any) -> None:
    """Write the manifest anew, with the sizes and hashes that the files have now and no
    signature.
    """
    lines = (checkpoint / MANIFEST).read_bytes().splitlines(keepends=True)
    values = json.loads(b"".join(lines[lines.index(b"{\n") :]))
    files = {
        name: {key: value for key, value in asdict(spec).items() if value}
        for name, spec in specs_of(checkpoint).items()
    }
    number = 1 if is_former(checkpoint) else FORMAT
    text = json.dumps({**values, "format": number, "files": files, **changes}, indent=1).encode()
    (checkpoint / MANIFEST).write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def to_former_format(path: Path) -> None:
    """Replace the files of a checkpoint by those that earlier versions have written for its
    tensors.
    """
    checkpoint = next(found for found in list_published(path.parent)[0] if found.path == path)
    index = read_index(checkpoint)
    tensors = {
        name: torch.zeros(saved.size, dtype=saved.properties.dtype)
        for name, saved in index.tensors.items()
    }
    read_tensors(tensors, path, index, None)
    for name in checkpoint.manifest.files:
        (path / name).unlink()
    dcp.save(
        tensors,
        storage_writer=dcp.FileSystemWriter(path),
        planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    write_fitting_manifest(path)


def _spec_of(raw: bytes, is_former: bool) -> FileSpec:
    if is_former:
        return FileSpec(len(raw), sha256=hashlib.sha256(raw).hexdigest())
    return FileSpec(len(raw), blake3=blake3(raw).hexdigest())
