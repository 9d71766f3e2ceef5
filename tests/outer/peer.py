"""A peer that exists to be killed: python -m tests.outer.peer KIND BOOTSTRAP..."""

import asyncio
import json
import sys
from typing import Any

from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.network.endpoints import Endpoint
from tests.outer.nets import B, key_of, member


async def main(kind: str, bootstrap: list[str]) -> None:
    network = await open_network(
        kind,
        NetworkSettings(
            "run",
            B.island,
            B.rank,
            bootstrap,
            island_key=key_of(B.island),
            connect_seconds=20,
            record_seconds=4,
        ),
    )
    waiting = asyncio.Event()

    async def hang(source: Endpoint, body: bytes) -> bytes:
        say({"called": True})
        await waiting.wait()
        return body

    network.messenger.serve("hang", hang)
    assert network.membership is not None
    await network.membership.announce(member(B.island))
    daemon = getattr(network.transport, "_daemon", None)
    pid = daemon.p2p._child.pid if daemon else None
    say(
        {
            "transport": network.transport.address,
            "control": network.messenger.address,
            "daemon": pid,
        }
    )
    line = await asyncio.to_thread(sys.stdin.readline)
    await network.transport.connect("1", {Endpoint(i, r): a for i, r, a in json.loads(line)})
    await waiting.wait()


def say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
