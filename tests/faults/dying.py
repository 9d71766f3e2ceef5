"""The command `diloco` with one rank that kills itself at a named point of its second save.

python -m tests.faults.dying POINT RANK train CONFIG ...     (before the first restart only)
"""

import os
import sys
from collections.abc import Callable

from diloco.cli.main import main
from tests.inner.checkpoint_crash import after_the_rename, kill_before, path_ends, while_deleting

IsPoint = Callable[[str, tuple], bool]
MIRROR = "other disk"


def in_the_second_save(is_the_point: IsPoint) -> IsPoint:
    begun: set[str] = set()

    def look(event: str, args: tuple) -> bool:
        # Rank 0 creates the folder, and rank 1 a file in it.
        if (event == "os.mkdir" and path_ends(args, ".partial")) or is_own_file(event, args):
            begun.add(str(args[0]).split(".partial")[0])
        return len(begun) >= 2 and is_the_point(event, args)

    return look


def is_own_file(event: str, args: tuple) -> bool:
    return event == "open" and "rank-1.tensors" in str(args[0]) and "x" in str(args[1])


def is_second_copy(event: str, args: tuple) -> bool:
    return (
        event == "os.rename" and path_ends(args, "manifest.json.partial") and MIRROR in str(args[0])
    )


POINTS: dict[str, Callable[[], IsPoint]] = {
    "before anything is written": lambda: (
        lambda event, args: event == "os.mkdir" and path_ends(args, ".partial")
    ),
    "between files": lambda: lambda event, args: event == "open" and "index.json" in str(args[0]),
    "before it is published": lambda: (
        lambda event, args: event == "os.rename" and path_ends(args, ".partial")
    ),
    "once it is published": after_the_rename,
    "while old ones are deleted": while_deleting,
    "while it is copied to the mirror": lambda: is_second_copy,
}
RANK_1: dict[str, Callable[[], IsPoint]] = {"before its own file": lambda: is_own_file}


def die_at(point: str) -> None:
    """Make this process kill itself with SIGKILL at the given point."""
    kill_before(in_the_second_save((POINTS | RANK_1)[point]()))


if __name__ == "__main__":
    point, rank, *arguments = sys.argv[1:]
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == rank:
        die_at(point)
    sys.argv = ["diloco", *arguments]
    main()
