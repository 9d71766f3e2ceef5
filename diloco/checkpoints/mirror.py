"""Copies of an island's checkpoints behind a URL that fsspec knows (s3://, gs://, memory://, a folder).

    URL/ISLAND/step-00000120/...    files as they are on the disk, the manifest last: what has none is not whole

A disk that is lost then does not end a run. Copying goes on behind the training. Which copy is newer, manifests say: a
run may have gone back to an earlier step. Each kind of store raises errors of its own, so any is a problem of the URL.
"""

import logging
import shutil
from pathlib import Path, PurePosixPath
from threading import Lock

import fsspec

from inner import checkpoint_folder as disk
from inner.checkpoint_folder import Contents, Found
from inner.errors import InputError

log = logging.getLogger(__name__)


class Mirror:
    """Of one island, on its leader. Every method raises InputError when the URL cannot be used."""

    def __init__(self, url: str, keep: int) -> None:
        self._url, self._keep = url, keep
        try:
            self._files, path = fsspec.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise InputError(f"island.checkpoint.mirror: got {url!r}; {error}") from None
        self._root = PurePosixPath(path)
        self._lock = Lock()

    def push(self, folder: Path) -> None:
        """Copy the newest checkpoint of `folder` there, unless it is; all but the newest few there are deleted."""
        try:
            with self._lock:
                self._push(folder)
        except Exception as error:
            raise InputError(f"{self._url}: the checkpoint was not copied there: {error}") from error

    def _push(self, folder: Path) -> None:
        whole, _ = disk.published(folder)
        if whole:
            self._copy_once(whole[0])
        kept = {found.path.name for found in whole[: self._keep]}
        for _, name in self._found()[: -self._keep]:
            if name not in kept:
                self._delete(name)

    def pull(self, folder: Path) -> str | None:
        """Copy the newest whole checkpoint there into `folder` when that has none as new: its name, or None."""
        try:
            mine = [found.contents.serial for found in disk.published(folder)[0]] if folder.is_dir() else []
            there = [(contents, name) for contents, name in self._found() if contents.serial > max(mine, default=0)]
            return self._fetch(*there[-1], folder) if there else None
        except Exception as error:
            raise InputError(f"{self._url}: its checkpoint cannot be copied from there: {error}") from error

    def _fetch(self, contents: Contents, name: str, folder: Path) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        # A damaged one may bear the name here.
        target = folder / (disk.free_name(folder, contents.inner_step) if (folder / name).exists() else name)
        partial = target.with_name(target.name + disk.PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        self._files.get(f"{self._root / name}/", f"{partial}/", recursive=True)
        partial.rename(target)
        return name

    def _found(self) -> list[tuple[Contents, str]]:
        """Whole checkpoints there and their names, oldest first."""
        found = []
        for path in map(PurePosixPath, self._files.glob(str(self._root / "step-*" / disk.MANIFEST))):
            if disk.PUBLISHED_NAME.fullmatch(path.parent.name):
                try:
                    contents = disk.read_manifest(self._files.cat_file(str(path)), str(path.parent))
                    found.append((contents, path.parent.name))
                except InputError as problem:
                    log.warning("the copy is passed over: %s", problem)
        return sorted(found, key=lambda pair: pair[0].serial)

    def _copy_once(self, newest: Found) -> None:
        serials = {name: contents.serial for contents, name in self._found()}
        name = newest.path.name
        if serials.get(name) == newest.contents.serial:
            return
        if name in serials:
            # Of the same step, before the run went back.
            self._delete(name)
        self._copy(newest.path)

    def _copy(self, checkpoint: Path) -> None:
        target = self._root / checkpoint.name
        self._files.makedirs(str(target), exist_ok=True)
        files = sorted(file.name for file in checkpoint.iterdir() if file.name != disk.MANIFEST)
        for name in files:
            self._files.put_file(str(checkpoint / name), str(target / name))
        # A kill in the middle of a copy leaves half a file on a disk: what makes the copy whole gets its name last.
        partial = str(target / (disk.MANIFEST + disk.PARTIAL))
        self._files.put_file(str(checkpoint / disk.MANIFEST), partial)
        self._files.mv(partial, str(target / disk.MANIFEST))

    def _delete(self, name: str) -> None:
        # The manifest first: what is deleted by halves must not look whole.
        self._files.rm_file(str(self._root / name / disk.MANIFEST))
        self._files.rm(str(self._root / name), recursive=True)
