"""The manifest of a checkpoint: the size and hash of each file, and the values that are saved
beside the tensors, as JSON.

The hashes reveal a truncated or corrupted file before it is loaded. They protect against accidents
only. A `Signer` protects against other people who can write to the folder: it signs the manifest,
and with it every file.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Protocol

from pydantic import Field, TypeAdapter, ValidationError

from inner.errors import InputError
from inner.foreign.text import parse_json

FORMAT = 2
READABLE = (1, FORMAT)
"""The formats that this version reads. Format 1 has the files of torch.distributed.checkpoint, and
SHA-256.
"""
MANIFEST = "manifest.json"
INDEX = "index.json"
FORMER_INDEX = ".metadata"
FILE_NAME = re.compile(r"index\.json|rank-\d{1,9}\.tensors|\.metadata|__\d{1,9}_\d{1,9}\.distcp")
"""The pattern of the names of all files of a checkpoint except the manifest."""
MAX_MANIFEST_BYTES = 1 << 26
MAX_FILES = 1 << 16
Count = Annotated[int, Field(ge=0, lt=1 << 62)]


@dataclass(frozen=True)
class FileSpec:
    """Expected size and hash of a file. One of the two hashes is given."""

    size_bytes: Count
    blake3: str = ""
    sha256: str = ""
    """In format 1."""

    @property
    def hash(self) -> str:
        return self.blake3 or self.sha256


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json."""

    inner_step: Count
    facts: dict[str, Any]
    """JSON values that were passed to save() and that load() returns."""
    optimizers: dict[str, str]
    """Class of the optimizer that steps each parameter, by parameter name."""
    files: dict[str, FileSpec] = field(default_factory=dict)
    serial: Count = 0
    """The number of this save among all saves into the folder. The step cannot order them: a run
    may resume from an older checkpoint."""


class Signer(Protocol):
    """Signs manifests, and decides which manifests are read.

    >>> Unsigned().check(Unsigned().sign(b"manifest"), "here") b'manifest'
    """

    def sign(self, manifest: bytes) -> bytes:
        """Return the manifest with a signature if this signer has a key, otherwise unchanged."""
        ...

    def check(self, raw: bytes, where: str) -> bytes:
        """Return the manifest without its signature. Raises InputError, naming `where`, if the
        manifest must not be read.
        """
        ...


class Unsigned:
    """Signs nothing and checks nothing."""

    def sign(self, manifest: bytes) -> bytes:
        """Return the manifest unchanged."""
        return manifest

    def check(self, raw: bytes, where: str) -> bytes:
        """Return the manifest unchanged."""
        return raw


@dataclass(frozen=True)
class _Header:
    """The fields that the manifests of all formats have."""

    format: int


_HEADER = TypeAdapter(_Header)
_MANIFEST = TypeAdapter(Manifest)


def write_manifest(manifest: Manifest, signer: Signer) -> bytes:
    """Return the bytes of a manifest file: the signature, then a line with the hash of the JSON,
    then the JSON.
    """
    files = {
        name: {"size_bytes": spec.size_bytes, **_hash_of(spec)}
        for name, spec in manifest.files.items()
    }
    values = {"format": FORMAT, **asdict(manifest), "files": files}
    text = json.dumps(values, indent=1, sort_keys=True, allow_nan=False).encode()
    return signer.sign(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def _hash_of(spec: FileSpec) -> dict[str, str]:
    return {"blake3": spec.blake3} if spec.blake3 else {"sha256": spec.sha256}


def parse_manifest(raw: bytes, path: str, signer: Signer) -> Manifest:
    """Parse the manifest of the checkpoint at `path`. Raises InputError if it is damaged, refused
    or malformed.
    """
    if len(raw) > MAX_MANIFEST_BYTES:
        raise InputError(
            f"{path}/{MANIFEST}: more than {MAX_MANIFEST_BYTES} bytes; a manifest is shorter"
        )
    digest, _, text = signer.check(raw, f"{path}/{MANIFEST}").partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise InputError(
            f"{path}/{MANIFEST}: damaged: its content has changed since it was written"
        )
    try:
        if (got := _HEADER.validate_json(text).format) not in READABLE:
            known = " and ".join(map(str, READABLE))
            raise InputError(
                f"{path}: written in format {got}, but this version reads formats {known}; use the "
                "version that wrote it"
            )
        _check_items(parse_json(text))
        manifest = _MANIFEST.validate_json(text, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise InputError(
            f"{path}/{MANIFEST}: not a manifest: {where}: {problem['msg']}; use another copy"
        ) from None
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path}/{MANIFEST}: not a manifest: {error}; use another copy") from None
    for name in manifest.files:
        if not FILE_NAME.fullmatch(name):
            raise InputError(
                f"{path}/{MANIFEST}: refused: {name!r} is not the name of a file of a checkpoint"
            )
    return manifest


def _check_items(values: dict[str, Any]) -> None:
    """Raise ValueError at the first wrong item. pydantic is not used: there may be millions, and it
    keeps an error for each.
    """
    optimizers = values.get("optimizers", {})
    files = values.get("files", {})
    if isinstance(optimizers, dict) and not all(
        isinstance(each, str) for each in optimizers.values()
    ):
        raise ValueError("optimizers: text expected for each name")
    if isinstance(files, dict) and len(files) > MAX_FILES:
        raise ValueError(f"files: {len(files)} of them; a checkpoint has at most {MAX_FILES}")
