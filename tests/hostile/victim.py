"""A rank that strangers attack: python -m tests.hostile.victim KIND BOOTSTRAP KEY_FILE. It tells
its address.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.network.endpoints import Endpoint
from outer.network.run_key import load_run_key

ROOT = Path(__file__).parents[2]


class Victim:
    """The process, as a test sees it."""

    def __init__(self, process: subprocess.Popen[bytes], told: dict[str, str]) -> None:
        self._process, self.control, self.transport = process, told["control"], told["transport"]

    @property
    def port(self) -> int:
        return int(self.control.rpartition(":")[2])

    @property
    def peak_bytes(self) -> int:
        """The largest resident memory that it has had."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None


@contextmanager
def victim(kind: str, bootstrap: str, key_file: Path | None = None) -> Iterator[Victim]:
    """Start a victim, and kill it at the end."""
    command = [
        sys.executable,
        "-m",
        "tests.hostile.victim",
        kind,
        bootstrap,
        *([str(key_file)] if key_file else []),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield Victim(process, json.loads(process.stdout.readline()))
        finally:
            process.kill()


async def main(kind: str, bootstrap: str, key_file: str | None = None) -> None:
    settings = NetworkSettings(
        "run", "victim", 0, [bootstrap] if bootstrap else [], run_key=load_run_key(key_file)
    )
    network = await open_network(kind, settings)

    async def hold(source: Endpoint, body: bytes) -> bytes:
        await asyncio.sleep(3600)
        return body

    async def count(source: Endpoint, body: bytes) -> bytes:
        return str(len(body)).encode()

    network.messenger.serve("hold", hold)
    network.messenger.serve("count", count)
    told = {"control": network.messenger.address, "transport": network.transport.address}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
