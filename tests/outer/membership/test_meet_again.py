"""A restarted bootstrap peer leads newcomers to the islands that continued without it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("hivemind")

from outer.connect.meeting import find_runs
from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.membership.dht.membership import HivemindMembership, serve_bootstrap
from tests.outer.nets import key_of, member, run


@pytest.mark.slow
def test_a_restarted_bootstrap_peer_leads_to_the_islands_again(tmp_path: Path):
    async def work() -> None:
        bootstrap = await serve_bootstrap(["/ip4/127.0.0.1/tcp/0"], tmp_path / "key")
        (address,) = bootstrap.addresses
        settings = NetworkSettings(
            "run", "a", 0, [address], record_seconds=4, island_key=key_of("a")
        )
        network = await open_network("hivemind", settings)
        membership = network.membership
        assert isinstance(membership, HivemindMembership)
        table = membership._dht.protocol.routing_table
        try:
            await membership.announce(member("a"))
            await membership.publish_config("{}")
            await bootstrap.close()
            await wait_for(
                lambda: not table.peer_id_to_uid
            )  # the DHT gives up a peer that does not answer
            bootstrap = await serve_bootstrap([address.partition("/p2p/")[0]], tmp_path / "key")
            await wait_for(lambda: bool(table.peer_id_to_uid))
            while "run" not in await find_runs(address, 5):  # noqa: ASYNC110 - another process has to come
                await asyncio.sleep(0.1)
        finally:
            await bootstrap.close()
            await network.close()

    run(work())


async def wait_for(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.05)
