"""Every reader of files that others have written answers what is wrong by its declared error, soon
and small.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from tests.foreign.readers import READERS

ROOT = Path(__file__).parents[2]
SECONDS = {25: 250, 2000: 3000}


def fuzz(folder: Path, count: int, *names: str) -> list[dict[str, object]]:
    """What tests/foreign/fuzz.py says of each reader. It ends with an error if one broke its
    promise.
    """
    command = [sys.executable, "-m", "tests.foreign.fuzz", str(folder), str(count), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS[count])
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_few_files_with_something_wrong_are_read_or_refused_by_every_reader(
    tmp_path: Path,
) -> None:
    found = fuzz(tmp_path, 25)
    assert [each["reader"] for each in found] == list(READERS)
    assert all(each["files"] == 25 for each in found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", READERS)
def test_thousands_of_files_with_something_wrong_are_read_or_refused(
    tmp_path: Path, name: str
) -> None:
    (found,) = fuzz(tmp_path, 2000, name)
    print(found)
    assert found["files"] == 2000
