"""When garbage is collected. Each test runs in a process of its own, because it changes the
collector of all.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
BEGIN = """
import gc
from diloco.runtime.garbage import COLLECT_STEPS, collect_garbage, schedule_garbage
fulls = []
def note(phase, info):
    if (phase, info["generation"]) == ("start", 2):
        fulls.append(step)
gc.callbacks.append(note)
step = None
"""


def printed(program: str) -> str:
    command = [sys.executable, "-c", BEGIN + program]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=True
    ).stdout.strip()


def test_only_the_schedule_begins_a_full_collection() -> None:
    program = """
schedule_garbage()
fulls.clear()
kept = []
for step in range(1, 2 * COLLECT_STEPS + 1):
    for _ in range(20_000):
        kept.append([])
    collect_garbage(step)
print(fulls == [COLLECT_STEPS, 2 * COLLECT_STEPS])
"""
    assert printed(program) == "True"


def test_a_full_collection_leaves_out_what_was_there_at_the_start() -> None:
    program = """
before = [[] for _ in range(100_000)]
schedule_garbage()
print(len(gc.get_objects()) < 1000, gc.get_freeze_count() > 100_000)
"""
    assert printed(program) == "True True"


def test_cycles_that_arise_between_collections_are_freed() -> None:
    program = """
import weakref
schedule_garbage()
class Node: pass
alive = []
for _ in range(5000):
    node = Node()
    node.itself = node
    alive.append(weakref.ref(node))
del node
print(sum(ref() is not None for ref in alive) < 2000)
"""
    assert printed(program) == "True"
