"""How the ranks of an island under torchrun have ended, for the records of its next life.

`diloco launch` sees each of its ranks end (ends.py). torchrun does not tell what it has seen, and
on several nodes no process sees all ranks. So each rank that ends leaves a note in the island's
folder, which its nodes share. A rank without a note was killed, or its node was lost. Only `diloco
train` leaves notes.
"""

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from diloco.runtime.ends import count_memory_kills
from diloco.watchdog.rank_notes import find_notes
from inner.files import write_atomically

FOLDER = "ends"
LIFE = "life.json"
"""In the folder while the island's ranks run, and after a life that has not ended as it should."""
FAILED = "failed: "
MEANWHILE = "; meanwhile "
MOST_CHARACTERS = 400


class RankEnd:
    """Leaves this rank's note, and on the leader finds those of the life before."""

    def __init__(self, folder: Path, rank: int) -> None:
        """`folder`: the island's."""
        self._folder = folder / FOLDER
        self._rank = rank
        self._memory_kills = count_memory_kills()

    def note(self, text: str) -> None:
        """Note why this rank ends, and whether the kernel has ended processes here meanwhile.

        Never raises.
        """
        memory = ""
        if more := (count_memory_kills() or 0) - (self._memory_kills or 0):
            where = socket.gethostname()
            memory = f"{MEANWHILE}the kernel ended {more} on {where} for lack of memory"
        with suppress(OSError):
            if self._folder.is_dir():
                (self._folder / str(self._rank)).write_text(f"{text[:MOST_CHARACTERS]}{memory}")

    def begin_life(self) -> str:
        """Return why the life before ended, if a rank failed or was killed; else an empty text.

        The leader calls it.
        """
        cause = ""
        with suppress(OSError, ValueError, KeyError, TypeError):
            life = json.loads((self._folder / LIFE).read_text())
            paths = [path for path in self._folder.iterdir() if path.name.isdecimal()]
            notes = {int(path.name): path.read_text() for path in paths}
            cause = describe_ends(notes, life["ranks"], life["per_node"])
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_notes()
            num_ranks = int(os.environ["WORLD_SIZE"])
            per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
            life = {"ranks": num_ranks, "per_node": per_node}
            write_atomically(self._folder / LIFE, json.dumps(life))
        return cause

    def end_life(self) -> None:
        """Note that all ranks end as they should. The leader calls it."""
        with suppress(OSError):
            self._remove_notes()

    def _remove_notes(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()


def build_rank_end(folder: Path) -> RankEnd | None:
    """Return the notes of this rank.

    None if `diloco launch` sees its end, or the island has no other ranks.
    """
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if is_alone or find_notes() is not None:
        return None
    return RankEnd(folder, int(os.environ["RANK"]))


def describe_ends(notes: Mapping[int, str], num_ranks: int, per_node: int) -> str:
    """Return which ranks were killed or have failed first; empty if all were asked to end.

    `notes`: by rank, of those that have left one.
    """
    lost = [rank for rank in range(num_ranks) if rank not in notes]
    failures = {rank: text for rank, text in sorted(notes.items()) if text.startswith(FAILED)}
    failed = [f"rank {rank} {text}" for rank, text in failures.items()]
    memory = [text.partition(MEANWHILE)[2] for text in notes.values() if MEANWHILE in text]
    told = [describe_lost(lost, num_ranks, per_node)] if lost else []
    # Ranks fail when one for which they wait is lost, so a loss says more.
    told += memory[:1] if lost else failed
    return "; ".join(told)


def describe_lost(lost: list[int], num_ranks: int, per_node: int) -> str:
    """Return that these ranks have left no note."""
    why = "without a word: killed (SIGKILL, out of memory), or the node was lost"
    if len(lost) == num_ranks:
        return f"all {num_ranks} ranks ended {why}"
    names = ", ".join(f"rank {rank} (node {rank // per_node})" for rank in lost)
    return f"{names} ended {why}"
