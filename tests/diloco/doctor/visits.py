"""Real swarms for a doctor to visit, and what it says of them."""

import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from diloco.config.schema import dump_config, parse_config
from diloco.doctor.address_checks import find_bind_problem
from diloco.doctor.checks import Check
from diloco.doctor.diagnose import Line, check_swarm
from diloco.swarm.visit import resolve_local_island
from outer.connect.settings import Network
from outer.diagnostics import DiagnosticsServer, ProbeResponder
from outer.network.endpoints import Endpoint
from tests.outer.nets import Swarm, member, swarm
from tests.swarm import TINY


def run_text(kind: str) -> str:
    """The config text of a run, as islands publish it."""
    return dump_config(parse_config(TINY, [f"outer.transport={kind}"]).run)


HELD: list[socket.socket] = []


def refusing_port() -> int:
    """A port at which nothing listens, and which no other process gets while the tests run."""
    HELD.append(socket.socket())
    HELD[-1].bind(("127.0.0.1", 0))
    return HELD[-1].getsockname()[1]


def free_port() -> int:
    """A port that is free, as are the next three. It is below those that the system gives to who
    asks for any port.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        if not any(find_bind_problem("127.0.0.1", each) for each in range(port, port + 4)):
            return port
    raise AssertionError("none of 100 ports is free")


async def enter(place: Swarm, me: Endpoint, clock=time.time, own=None, **changes) -> Network:
    """An island of the run that answers a doctor, in the swarm's records. `own`: other settings of
    its network.
    """
    network = await place.open(me, **(own or {}))
    assert network.membership is not None
    hash_ = parse_config(run_text(place.kind)).run.hash
    DiagnosticsServer(network.messenger, ProbeResponder(hash_, lambda: 3, clock))
    own_record = {
        "control_addresses": [network.messenger.address],
        "transport_addresses": [network.transport.address],
    }
    record: dict[str, Any] = own_record | {"config_hash": hash_, "round": 3} | changes
    await network.membership.publish_config(run_text(place.kind))
    await network.membership.announce(member(me.island, **record))
    return network


@asynccontextmanager
async def entered(kind: str, *islands: Endpoint) -> AsyncIterator[Swarm]:
    async with swarm(kind, "test") as place:
        for island in islands:
            await enter(place, island)
        yield place


async def visited(address: str, *overrides: str, config_text: str | None = None) -> list[Line]:
    """All that a doctor with these settings says of the swarm at an address."""
    settings = ["island.connect_seconds=30", *overrides]
    config = parse_config(config_text, settings) if config_text is not None else None
    subject = resolve_local_island(config, parse_config("", settings), address)
    return [line async for line in check_swarm(subject, address, None)]


def troubles(lines: list[Line]) -> list[tuple[str, str]]:
    """Level and name of what is not ok."""
    return [
        (line.level, line.name) for line in lines if isinstance(line, Check) and line.level != "ok"
    ]


def texts(lines: list[Line], name: str) -> list[str]:
    """Of the checks of this name."""
    return [line.text for line in lines if isinstance(line, Check) and line.name == name]


def key_file(folder: Path, secret: bytes | None) -> list[str]:
    if secret is None:
        return []
    path = folder / "run.key"
    path.write_bytes(secret)
    path.chmod(0o600)
    return [f"island.run_key_file={path}"]
