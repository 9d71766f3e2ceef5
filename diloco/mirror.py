"""Copies of an island's checkpoints behind a URL that fsspec knows (s3://, gs://, memory://, a folder).

    URL/ISLAND/step-00000120/...    files as they are on the disk, the manifest last: what has none is not whole

A disk that is lost then does not end a run. Copying goes on behind the training.
"""

import logging
import shutil
from pathlib import Path, PurePosixPath
from threading import Lock

import fsspec

from inner import checkpoint_folder as disk
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
        except OSError as error:
            raise InputError(f"{self._url}: the checkpoint was not copied there: {error}") from error

    def _push(self, folder: Path) -> None:
        whole, _ = disk.published(folder)
        there = self._names()
        if whole and whole[0].path.name not in there:
            self._copy(whole[0].path)
            there = self._names()
        kept = {found.path.name for found in whole[: self._keep]}
        for name in there[: max(len(there) - self._keep, 0)]:
            if name not in kept:
                self._delete(name)

    def pull(self, folder: Path) -> str | None:
        """Copy the newest whole checkpoint there into `folder` when that has none as new: its name, or None."""
        try:
            names = self._names()
            mine = [found.path.name for found in disk.published(folder)[0]] if folder.is_dir() else []
            if not names or (mine and max(map(_order, mine)) >= _order(names[-1])):
                return None
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / (names[-1] + disk.PARTIAL)
            shutil.rmtree(partial, ignore_errors=True)
            self._files.get(f"{self._root / names[-1]}/", f"{partial}/", recursive=True)
            partial.rename(folder / names[-1])
        except OSError as error:
            raise InputError(f"{self._url}: its checkpoint cannot be copied from there: {error}") from error
        return names[-1]

    def _names(self) -> list[str]:
        """Whole checkpoints there, oldest first."""
        found = self._files.glob(str(self._root / "step-*" / disk.MANIFEST))
        names = [PurePosixPath(path).parent.name for path in found]
        return sorted((name for name in names if disk.PUBLISHED_NAME.fullmatch(name)), key=_order)

    def _copy(self, checkpoint: Path) -> None:
        target = self._root / checkpoint.name
        self._files.makedirs(str(target), exist_ok=True)
        files = sorted(checkpoint.iterdir(), key=lambda file: file.name == disk.MANIFEST)
        for file in files:
            self._files.put_file(str(file), str(target / file.name))

    def _delete(self, name: str) -> None:
        # The manifest first: what is deleted by halves must not look whole.
        self._files.rm_file(str(self._root / name / disk.MANIFEST))
        self._files.rm(str(self._root / name), recursive=True)


def _order(name: str) -> tuple[int, int]:
    """step-00000120-2 comes after step-00000120."""
    step, *again = name.removeprefix("step-").split("-")
    return int(step), int(again[0]) if again else 1
