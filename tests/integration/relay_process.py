"""A relay in a process of its own, for tests that kill it."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from diloco.swarm.bootstrap import PREFIX
from diloco.watchdog.signals import end_with_parent


@contextmanager
def relay_process(
    *options: str, prefix: Sequence[str] = ()
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `diloco relay`, and kill it at the end. Gives its address. `prefix` is put in front of
    the command.
    """
    command = [*prefix, sys.executable, "-m", "diloco", "relay", *options]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=env, preexec_fn=end_with_parent
    )
    try:
        assert process.stdout is not None
        yield (
            next(line for line in process.stdout if line.startswith(PREFIX))
            .removeprefix(PREFIX)
            .strip(),
            process,
        )
    finally:
        process.kill()
        process.wait(60)
