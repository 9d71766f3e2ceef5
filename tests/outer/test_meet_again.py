"""A bootstrap peer that was killed and started again leads newcomers to the islands that went on without it."""

import asyncio
import subprocess
import sys
from pathlib import Path

from outer.membership.hivemind import HivemindMembership
from outer.network import NetworkSettings, open_network, visit
from tests.outer.nets import ROOT, member, run


class Bootstrap:
    """A bootstrap process, which keeps its identity."""

    def __init__(self, identity: Path, port: str = "0") -> None:
        command = [sys.executable, "-u", "-m", "diloco", "bootstrap", "--identity", str(identity), "--port", port]
        self._process = subprocess.Popen([*command, "--host", "127.0.0.1"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        self.address = next(line for line in self._process.stdout if line.startswith("address: ")).split()[1]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def test_a_restarted_bootstrap_peer_leads_to_the_islands_again(tmp_path: Path):
    held = [Bootstrap(tmp_path / "key")]
    address = held[0].address

    async def work() -> None:
        network = await open_network("hivemind", NetworkSettings("run", "a", 0, [address], record_seconds=4))
        membership = network.membership
        assert isinstance(membership, HivemindMembership)
        table = membership._dht.protocol.routing_table
        try:
            await membership.announce(member("a"))
            await membership.publish_config("{}")
            held[0].kill()
            await until(lambda: not table.peer_id_to_uid)  # the DHT gives up a peer that does not answer
            held.append(await asyncio.to_thread(Bootstrap, tmp_path / "key", address.split("/")[4]))
            await until(lambda: bool(table.peer_id_to_uid))
            while "run" not in await visit(address, 5):
                await asyncio.sleep(0.1)
        finally:
            await network.close()

    try:
        run(work())
    finally:
        for process in held:
            process.kill()


async def until(is_so) -> None:
    while not is_so():
        await asyncio.sleep(0.05)
