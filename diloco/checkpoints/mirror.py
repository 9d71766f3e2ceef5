"""Copies of an island's checkpoints at a URL that fsspec supports (s3://, gs://, a folder).

    URL/ISLAND/step-00000120/...    the checkpoint's files; the manifest is written last and
                                    completes the copy

With a mirror, a run survives the loss of a disk. Copying happens in the background. The manifests
decide which copy is newer, because a run may have returned to an earlier step.

Others may be able to write to the URL. Only the files that a manifest names are fetched, and a
fetched checkpoint gets its name only if the sizes and hashes of its files are right. Every fsspec
backend raises its own types of errors, so any exception counts as a problem of the URL.
"""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Lock

from inner.checkpoint import folder as disk
from inner.checkpoint.folder import SavedCheckpoint
from inner.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, Signer, parse_manifest
from inner.errors import InputError
from inner.files import open_url

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Copy:
    """A complete checkpoint at the URL."""

    name: str
    raw: bytes
    """Content of the manifest file, with its signature."""
    manifest: Manifest


class Mirror:
    """The mirror of one island's checkpoints; only the leader has one. Methods raise InputError if
    the URL fails.
    """

    def __init__(self, url: str, keep: int, signer: Signer = disk.UNSIGNED) -> None:
        self._url = url
        self._keep = keep
        self._signer = signer
        self._files, self._root = open_url(url, f"island.checkpoint.mirror: got {url!r}")
        self._lock = Lock()

    def push(self, folder: Path) -> None:
        """Copy the newest checkpoint of `folder` to the URL if it is not there.

        Delete the oldest copies.
        """
        try:
            with self._lock:
                published, _ = disk.list_published(folder, self._signer)
                whole = [checkpoint for checkpoint in published if not checkpoint.is_rejected]
                if whole:
                    self._copy_once(whole[0])
                kept = {found.path.name for found in whole[: self._keep]}
                for name in [copy.name for copy in self._list()[0]][: -self._keep]:
                    if name not in kept:
                        self._delete(name)
        except Exception as error:
            raise InputError(
                f"{self._url}: the checkpoint was not copied there: {error}"
            ) from error

    def pull(self, folder: Path) -> str | None:
        """Copy the newest complete checkpoint of the URL into `folder`.

        Return its name; None if none is newer. Damaged and refused copies are skipped with a
        warning. Raises InputError if the URL has no others and `folder` has no checkpoint.
        """
        try:
            local = disk.list_published(folder, self._signer)[0] if folder.is_dir() else []
            copies, problems = self._list()
            for copy in reversed(copies):
                if copy.manifest.serial > max(
                    (found.manifest.serial for found in local), default=0
                ):
                    try:
                        return self._fetch(copy, folder)
                    except InputError as problem:
                        problems.append(str(problem))
        except Exception as error:
            raise InputError(
                f"{self._url}: its checkpoint cannot be copied from there: {error}"
            ) from error
        if problems and not local:
            raise InputError(f"{self._url}: none of its checkpoints can be used; {problems[-1]}")
        for problem in problems:
            log.warning("ignoring a copy: %s", problem)
        return None

    def _fetch(self, copy: Copy, folder: Path) -> str:
        """Copy one checkpoint, and check it before it gets its name.

        Raises InputError if a file is damaged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        files = copy.manifest.files
        for name, spec in files.items():
            if (size := self._size_of(f"{copy.name}/{name}")) != spec.size_bytes:
                raise InputError(
                    f"{copy.name}/{name}: damaged: it has {size} bytes, {spec.size_bytes} were "
                    "written"
                )
        size = sum(spec.size_bytes for spec in files.values())
        partial = disk.create_partial(folder, copy.manifest.inner_step, size, len(files))
        try:
            for name in files:
                self._files.get_file(str(self._root / copy.name / name), str(partial / name))
            if problem := disk.find_damage(SavedCheckpoint(partial, copy.manifest), files):
                raise InputError(problem)
            # A damaged local checkpoint may already have this name.
            is_taken = (folder / copy.name).exists()
            disk.finish(
                partial,
                copy.raw,
                partial.name.removesuffix(disk.PARTIAL) if is_taken else copy.name,
            )
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return copy.name

    def _list(self) -> tuple[list[Copy], list[str]]:
        """Return the complete checkpoints at the URL, and a message per damaged or refused one.

        The oldest checkpoint comes first.
        """
        copies = []
        problems = []
        # Backends cache listings, which then lack what other processes have written since.
        self._files.invalidate_cache()
        for path in map(PurePosixPath, self._files.glob(str(self._root / "step-*" / MANIFEST))):
            name = path.parent.name
            if disk.PUBLISHED_NAME.fullmatch(name):
                where = str(self._root / name)
                try:
                    self._size_of(f"{name}/{MANIFEST}")
                    raw = self._files.cat_file(
                        f"{where}/{MANIFEST}", start=0, end=MAX_MANIFEST_BYTES + 1
                    )
                    copies.append(Copy(name, raw, parse_manifest(raw, where, self._signer)))
                except InputError as problem:
                    problems.append(str(problem))
        return sorted(copies, key=lambda copy: copy.manifest.serial), problems

    def _size_of(self, name: str) -> int:
        """Return the bytes of a file of a copy.

        Raises InputError if it is not a regular file, such as a FIFO.
        """
        info = self._files.info(str(self._root / name))
        if info["type"] != "file":
            raise InputError(
                f"{self._url}: {name} is a {info['type']}, and a copy has files only; remove it"
            )
        return info["size"]

    def _copy_once(self, newest: SavedCheckpoint) -> None:
        checkpoint = newest.path
        serials = {copy.name: copy.manifest.serial for copy in self._list()[0]}
        if serials.get(checkpoint.name) == newest.manifest.serial:
            return
        if checkpoint.name in serials:
            # The copy is of the same step, made before the run returned to an earlier one.
            self._delete(checkpoint.name)
        target = self._root / checkpoint.name
        self._files.makedirs(str(target), exist_ok=True)
        files = sorted(file.name for file in checkpoint.iterdir() if file.name != MANIFEST)
        for name in files:
            self._files.put_file(str(checkpoint / name), str(target / name))
        # A kill may leave a partly written file: the manifest, which completes the copy, is renamed
        # when it is whole.
        partial = str(target / (MANIFEST + disk.PARTIAL))
        self._files.put_file(str(checkpoint / MANIFEST), partial)
        self._files.mv(partial, str(target / MANIFEST))

    def _delete(self, name: str) -> None:
        # The manifest is deleted first, so that a partly deleted copy does not look complete.
        self._files.rm_file(str(self._root / name / MANIFEST))
        self._files.rm(str(self._root / name), recursive=True)
