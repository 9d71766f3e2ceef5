"""What goes between device and host outside of inner steps waits for the device once, however many
tensors it has.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

GUARD_SECONDS = 300


@cache
def seam() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.scale.seam"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=GUARD_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_slices_come_to_the_host_with_one_wait() -> None:
    assert seam()["read"] == {"waits": 1, "copied to the host": seam()["slices"]}
    assert seam()["is_on_host"]


def test_slices_go_to_the_device_without_a_wait() -> None:
    assert seam()["write"] == {"waits": 0, "copied to the device": seam()["slices"]}


def test_a_checkpoint_is_copied_with_one_wait() -> None:
    assert seam()["save"] == {"waits": 1, "copied to the host": seam()["tensors"]}
    assert seam()["keeps_types"], "DTensors are written as shards"
