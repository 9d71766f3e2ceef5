"""Copies of an island's checkpoints at any URL that fsspec supports (s3://, gs://, memory://, a folder).

    URL/ISLAND/step-00000120/...    the checkpoint's files; the manifest is written last and completes the copy

With a mirror, a run survives the loss of a disk. Copying happens in the background. The manifests decide which copy is
newer, because a run may have returned to an earlier step. Every fsspec backend raises its own types of errors, so any
exception counts as a problem of the URL.
"""

import logging
import shutil
from pathlib import Path, PurePosixPath
from threading import Lock

import fsspec

from inner.checkpoint import folder as disk
from inner.checkpoint.folder import Manifest, SavedCheckpoint
from inner.errors import InputError

log = logging.getLogger(__name__)


class Mirror:
    """The mirror of one island's checkpoints; only the leader has one. Methods raise InputError if the URL fails."""

    def __init__(self, url: str, keep: int) -> None:
        self._url, self._keep = url, keep
        try:
            self._files, path = fsspec.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise InputError(f"island.checkpoint.mirror: got {url!r}; {error}") from None
        self._root = PurePosixPath(path)
        self._lock = Lock()

    def push(self, folder: Path) -> None:
        """Copy the newest checkpoint of `folder` to the URL if it is not there; delete all but the newest few."""
        try:
            with self._lock:
                whole, _ = disk.list_published(folder)
                if whole:
                    self._copy_once(whole[0])
                kept = {found.path.name for found in whole[: self._keep]}
                for _, name in self._list()[: -self._keep]:
                    if name not in kept:
                        self._delete(name)
        except Exception as error:
            raise InputError(f"{self._url}: the checkpoint was not copied there: {error}") from error

    def pull(self, folder: Path) -> str | None:
        """Copy the newest complete checkpoint of the URL into `folder`. Returns its name; None if none is newer."""
        try:
            local = [found.manifest.serial for found in disk.list_published(folder)[0]] if folder.is_dir() else []
            newer = [(manifest, name) for manifest, name in self._list() if manifest.serial > max(local, default=0)]
            return self._fetch(*newer[-1], folder) if newer else None
        except Exception as error:
            raise InputError(f"{self._url}: its checkpoint cannot be copied from there: {error}") from error

    def _fetch(self, manifest: Manifest, name: str, folder: Path) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        # A damaged local checkpoint may already have this name.
        target = folder / (disk.free_name(folder, manifest.inner_step) if (folder / name).exists() else name)
        partial = target.with_name(target.name + disk.PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        self._files.get(f"{self._root / name}/", f"{partial}/", recursive=True)
        partial.rename(target)
        return name

    def _list(self) -> list[tuple[Manifest, str]]:
        """Contents and names of the complete checkpoints at the URL, oldest first."""
        checkpoints = []
        for path in map(PurePosixPath, self._files.glob(str(self._root / "step-*" / disk.MANIFEST))):
            if disk.PUBLISHED_NAME.fullmatch(path.parent.name):
                try:
                    manifest = disk.read_manifest(self._files.cat_file(str(path)), str(path.parent))
                    checkpoints.append((manifest, path.parent.name))
                except InputError as problem:
                    log.warning("ignoring a damaged copy: %s", problem)
        return sorted(checkpoints, key=lambda pair: pair[0].serial)

    def _copy_once(self, newest: SavedCheckpoint) -> None:
        checkpoint, serials = newest.path, {name: manifest.serial for manifest, name in self._list()}
        if serials.get(checkpoint.name) == newest.manifest.serial:
            return
        if checkpoint.name in serials:
            # The copy is of the same step, from before the run returned to an earlier one.
            self._delete(checkpoint.name)
        target = self._root / checkpoint.name
        self._files.makedirs(str(target), exist_ok=True)
        files = sorted(file.name for file in checkpoint.iterdir() if file.name != disk.MANIFEST)
        for name in files:
            self._files.put_file(str(checkpoint / name), str(target / name))
        # A kill may leave a partly written file: the manifest, which completes the copy, is renamed when it is whole.
        partial = str(target / (disk.MANIFEST + disk.PARTIAL))
        self._files.put_file(str(checkpoint / disk.MANIFEST), partial)
        self._files.mv(partial, str(target / disk.MANIFEST))

    def _delete(self, name: str) -> None:
        # The manifest is deleted first, so that a partly deleted copy does not look complete.
        self._files.rm_file(str(self._root / name / disk.MANIFEST))
        self._files.rm(str(self._root / name), recursive=True)
