"""A bootstrap process for tests that can be killed and restarted at the same address."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from diloco.simulate.fleet import port_of
from diloco.swarm.bootstrap import PREFIX
from diloco.watchdog.signals import end_with_parent

KINDS = {"gloo": "tcp", "tls": "tcp", "hivemind": "dht"}
"""Kind of rendezvous, by transport."""
START_SECONDS = 900.0
POLL_SECONDS = 0.02


class Bootstrap:
    """A process that runs `diloco bootstrap`. What it prints is in the folder, in bootstrap.log."""

    def __init__(self, transport: str, folder: Path, host: str, prefix: Sequence[str]) -> None:
        self._command = [
            *prefix,
            sys.executable,
            "-m",
            "diloco",
            "bootstrap",
            "--rendezvous",
            KINDS[transport],
        ]
        self._command += ["--host", host]
        if transport == "hivemind":
            self._command += ["--identity", str(folder / "bootstrap.key")]
        self._log = folder / "bootstrap.log"
        self._start()
        self.address = self._wait_for_address()
        self._command += ["--port", port_of(self.address)]

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60)

    def restart(self) -> None:
        """Start the killed process again, and wait until it serves."""
        self.begin_restart()
        assert self._wait_for_address() == self.address, "it came back at another address"

    def begin_restart(self) -> None:
        """Start the killed process again. `is_back` says when it serves."""
        self._start()

    def is_back(self) -> bool:
        """Whether the process serves again. Raises AssertionError if it has ended instead."""
        address = self._find_address()
        assert address in (None, self.address), f"it came back at another address: {address}"
        return address is not None

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _start(self) -> None:
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        with self._log.open("w") as log:
            # A session of its own, as each island has: so it gets as much of a busy machine as they
            # do.
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                preexec_fn=end_with_parent,
                start_new_session=True,
            )

    def _find_address(self) -> str | None:
        """Return the address that the process has printed, or None before it serves. Raises
        AssertionError if the process has ended.
        """
        code = self._process.poll()
        text = self._log.read_text()
        assert code is None, f"the bootstrap process has ended with status {code}: {text[-1000:]}"
        printed = [line for line in text.splitlines(keepends=True) if line.startswith(PREFIX)]
        if not printed or not printed[0].endswith("\n"):
            return None
        return printed[0].removeprefix(PREFIX).strip()

    def _wait_for_address(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while (address := self._find_address()) is None:
            assert time.monotonic() < deadline, (
                f"no address after {START_SECONDS:.0f} s: {self._log.read_text()}"
            )
            time.sleep(POLL_SECONDS)
        return address


@contextmanager
def bootstrap(
    transport: str, folder: Path, host: str = "127.0.0.1", prefix: Sequence[str] = ()
) -> Iterator[Bootstrap]:
    """Open the kind of bootstrap process that the transport needs. `prefix` is put in front of its
    command.
    """
    folder.mkdir(parents=True, exist_ok=True)
    served = Bootstrap(transport, folder, host, prefix)
    try:
        yield served
    finally:
        served.end()
