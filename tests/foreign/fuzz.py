"""Lets a reader read files with something wrong in them, in a process of its own, and measures what
it takes.

    python -m tests.foreign.fuzz FOLDER COUNT [READER ...]

Prints one line of JSON for each reader. Ends with an error that names the file that was read, which
is left there.

Memory is the largest resident size while a file is read, which Linux keeps and lets a process
reset, above the size before. A limit on addresses would count what allocators and maps only
reserve; there is one all the same, of some GB, for the sake of the machine, and running into it is
a failure, also where it was reported as a broken file.
"""

import json
import logging
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from tests.foreign.mutations import damaged, odd_json
from tests.foreign.readers import READERS, Reader
from tests.memory import read_status, reset_peak

MOST_SECONDS = 1.0
MOST_BYTES = 200_000_000
ADDRESS_BYTES = 4 << 30
SEED = 43
QUIETLY = settings(
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,
)


@dataclass
class Findings:
    """What one reader did."""

    reader: str
    files: int = 0
    refused: int = 0
    most_seconds: float = 0.0
    """Of CPU time, of all threads."""
    most_bytes: int = 0


def main(folder: Path, count: int, names: list[str]) -> None:
    """Fuzz the readers of these names, or all."""
    logging.disable()
    for number, name in enumerate(names or READERS):
        place = folder / str(number)
        place.mkdir(parents=True)
        print(json.dumps(asdict(fuzz(name, READERS[name], place, count))), flush=True)


def fuzz(name: str, reader: Reader, folder: Path, count: int) -> Findings:
    """Read `count` files, each of which differs from a valid one. Raises AssertionError at the
    first that breaks it.
    """
    path, found = reader.prepare(folder), Findings(name)
    valid = path.read_bytes()
    reader.read(path)  # The valid file is read, and what a first call loads is there.
    resource.setrlimit(
        resource.RLIMIT_AS, (read_status("VmSize") + ADDRESS_BYTES, resource.RLIM_INFINITY)
    )
    files = damaged(valid) | odd_json(valid) if reader.is_json else damaged(valid)

    @seed(SEED)
    @settings(QUIETLY, max_examples=count)
    @given(files)
    def read_one(data: bytes) -> None:
        path.write_bytes(data)
        found.files += 1
        reset_peak()
        before, start = read_status("VmRSS"), time.process_time()
        try:
            reader.read(path)
        except reader.error as error:
            found.refused += 1
            assert not any(isinstance(each, MemoryError) for each in _chain(error)), (
                f"{path} filled the memory"
            )
        except BaseException as error:
            raise AssertionError(f"{path} was answered by {type(error).__name__}") from error
        seconds, grown = time.process_time() - start, read_status("VmHWM") - before
        found.most_seconds, found.most_bytes = (
            max(found.most_seconds, seconds),
            max(found.most_bytes, grown),
        )
        assert seconds < MOST_SECONDS and grown < MOST_BYTES, (
            f"{path} took {seconds:.1f} s and {grown} bytes"
        )

    read_one()
    return found


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
