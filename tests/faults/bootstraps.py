"""A bootstrap process for tests that can be killed and restarted at the same address."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from diloco.simulate.fleet import port_of
from diloco.swarm.bootstrap import PREFIX
from diloco.watchdog.signals import end_with_parent

KINDS = {"gloo": "tcp", "tls": "tcp", "hivemind": "dht"}
"""Kind of rendezvous, by transport."""


class Bootstrap:
    """A process that runs `diloco bootstrap`."""

    def __init__(self, transport: str, folder: Path, host: str, prefix: Sequence[str]) -> None:
        self._command = [*prefix, sys.executable, "-m", "diloco", "bootstrap", "--rendezvous", KINDS[transport]]
        self._command += ["--host", host]
        if transport == "hivemind":
            self._command += ["--identity", str(folder / "bootstrap.key")]
        self.address = self._start()
        self._command += ["--port", port_of(self.address)]

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60)

    def restart(self) -> None:
        assert self._start() == self.address, "it came back at another address"

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _start(self) -> str:
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, text=True, env=env, preexec_fn=end_with_parent
        )
        assert self._process.stdout is not None
        return next(line for line in self._process.stdout if line.startswith(PREFIX)).removeprefix(PREFIX).strip()


@contextmanager
def bootstrap(transport: str, folder: Path, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> Iterator[Bootstrap]:
    """Open the kind of bootstrap process that the transport needs. `prefix` is put in front of its command."""
    folder.mkdir(parents=True, exist_ok=True)
    served = Bootstrap(transport, folder, host, prefix)
    try:
        yield served
    finally:
        served.end()
