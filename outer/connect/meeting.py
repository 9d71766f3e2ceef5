"""The place where islands over gloo and tls meet: a rendezvous, or a DHT beside tls. Also lists
the runs at an address.
"""

from outer.connect.settings import Network, NetworkSettings
from outer.errors import InputError
from outer.membership.records import RunInfo
from outer.membership.rendezvous_link import is_of_dht
from outer.membership.tcp import find_runs_at_rendezvous, open_membership
from outer.network.run_key import PeerAuth, RunKey
from outer.packages import MEET_ELSEWHERE, require_hivemind
from outer.routes.dialer import Dialer
from outer.routes.proxy import parse_proxy


async def meet(
    settings: NetworkSettings,
    network: Network,
    auth: PeerAuth,
    dialer: Dialer | None = None,
    *,
    is_reachable: bool = True,
) -> Network:
    """Add the membership to the network, on rank 0, and return the network. It is closed if this
    fails.

    `is_reachable`: others can reach this machine without a relay.
    """
    if settings.rank > 0:
        return network
    try:
        if is_of_dht(settings.bootstrap):
            await _meet_in_dht(settings, network, auth, is_reachable=is_reachable)
        else:
            await _meet_at_rendezvous(settings, network, auth, dialer)
    except BaseException:
        await network.close()
        raise
    return network


async def _meet_at_rendezvous(
    settings: NetworkSettings, network: Network, auth: PeerAuth, dialer: Dialer | None
) -> None:
    seconds = settings.record_seconds / 3, settings.connect_seconds
    membership = await open_membership(
        settings.bootstrap, settings.run_id, settings.me, *seconds, auth, dialer
    )
    network.membership = membership
    network._closers = (*network._closers, membership.close)


async def _meet_in_dht(
    settings: NetworkSettings, network: Network, auth: PeerAuth, *, is_reachable: bool
) -> None:
    require_hivemind("a DHT, whose addresses are in island.bootstrap,", MEET_ELSEWHERE)
    from outer.membership.dht.beside import Meeting, NodePlace, open_dht_beside

    if settings.proxy is not None:
        raise InputError(
            "island.bootstrap: got addresses of a DHT, to which island.proxy does not lead; let "
            "the islands of this run meet at a rendezvous: `diloco bootstrap --rendezvous tcp`"
        )
    host = settings.listen_host if is_reachable else None
    place = NodePlace(host, settings.dht_port, settings.announce_host, settings.identity_path)
    meeting = Meeting(
        settings.run_id, settings.bootstrap, settings.connect_seconds, settings.record_seconds
    )
    membership, daemon = await open_dht_beside(meeting, place, auth)
    network.membership = membership
    network.wait_for_loss = daemon.wait_for_loss
    network._closers = (*network._closers, membership.close, daemon.close)


async def find_runs(
    address: str,
    connect_seconds: float,
    run_key: RunKey | None = None,
    proxy: str | None = None,
    run_name: str | None = None,
) -> dict[str, RunInfo]:
    """Return the runs at a bootstrap address that `run_key` opens, by id. In a DHT, `run_name` is
    read directly if given.

    Raises InputError if the address is unreachable or the key opens no run.
    """
    if address.startswith("tcp://"):
        return await find_runs_at_rendezvous(
            address, connect_seconds, run_key, Dialer(parse_proxy(proxy))
        )
    if address.startswith("/"):
        require_hivemind(f"the DHT at {address}", MEET_ELSEWHERE)
        from outer.membership.dht.membership import find_runs_in_swarm

        return await find_runs_in_swarm(address, connect_seconds, run_key, run_name)
    raise InputError(
        f"got the address {address!r}; allowed: /ip4/HOST/tcp/PORT/p2p/PEER_ID or tcp://HOST:PORT, "
        "as `diloco bootstrap` prints it"
    )
