"""Checks of `diloco doctor` on one remote island: whether it and this machine reach each other, and
how fast.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from statistics import median

from diloco.config.schema import RunConfig
from diloco.doctor.checks import Check
from diloco.doctor.machine_checks import state_bytes
from diloco.doctor.path_checks import MAX_RANKS, check_gloo_ports, check_paths
from diloco.formatting import human_bytes, human_seconds
from diloco.swarm.visit import LocalIsland, describe_silence
from outer import diagnostics
from outer.connect.settings import Network
from outer.errors import MessageError, OuterError, is_about_run_key
from outer.membership.base import Member
from outer.network.endpoints import Endpoint, Messenger
from outer.network.messages import call_message
from outer.routes.addresses import is_loopback

CALL_SECONDS = 10.0
BULK_SECONDS = 30.0
NUM_SAMPLES = 5
FIRST_BYTES = 1 << 16
GROWTH = 8
ENOUGH_SECONDS = 0.5
"""A transfer of this duration measures the link. After a shorter one, a larger one follows."""
CLOCK_NOTICED = 1.0
CLOCK_FAILED = 5.0
"""Clock differences in seconds. A record of hivemind expires after 15 s by its reader's clock."""
CLOCK_CURE = "synchronise both clocks by NTP, for example with `timedatectl set-ntp true`"


@dataclass
class RemoteIsland:
    """An island of the run, and the means to check it."""

    member: Member
    run: RunConfig
    messenger: Messenger
    """The doctor's messenger."""
    local: LocalIsland
    callback: "CallbackListener | None"
    round_trip: float = 0.0
    """Measured round-trip time in seconds; 0 before the measurement."""

    @property
    def address(self) -> str:
        return self.member.control_addresses[0]

    async def call_bulk(self, kind: str, body: bytes) -> bytes:
        """Call rank 0 with a large request or reply."""
        return await self.messenger.call(
            self.address, kind, body, timeout_seconds=BULK_SECONDS, lane="bulk"
        )


class CallbackListener:
    """Listens as an island on this machine would, and collects the names of the islands that
    call.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.callers: set[str] = set()
        self._responder = diagnostics.ProbeResponder()
        network.messenger.serve("probe", self._on_probe)

    async def _on_probe(self, source: Endpoint, body: bytes) -> bytes:
        self.callers.add(source.island)
        return self._responder.respond(body)


async def check_remote_island(remote: RemoteIsland) -> AsyncIterator[Check]:
    """Run all checks of one island, or only the first one if the island cannot be reached."""
    addresses = remote.member.control_addresses[:MAX_RANKS]
    answers = await asyncio.gather(
        *(probe(remote.messenger, a) for a in addresses), return_exceptions=True
    )
    yield check_reached(remote, answers)
    first = answers[0]
    if not isinstance(first, diagnostics.ProbeReply):
        return
    yield check_versions(first)
    if first.config_hash != remote.run.hash:
        text = f"the island uses hash {first.config_hash}, the swarm's config has {remote.run.hash}"
        yield Check("warning", "config", f"{text}; does the island run another version?")
    try:
        for check in await check_calls(remote):
            yield check
    except OuterError as error:
        yield Check("FAILED", "round trip", f"the island answered once, and then: {error}")
        return
    yield await check_rate(remote, "bandwidth down", lambda n: download_bytes(remote, n))
    yield await check_rate(
        remote, "bandwidth up", lambda n: remote.call_bulk("probe_sink", bytes(n))
    )
    network = remote.run.outer.network
    if network.opens_random_ports:
        yield await check_gloo_ports(remote.member)
    if network.has_routes:
        async for check in check_paths(remote.member, remote.local):
            yield check
    if remote.callback is not None:
        yield await check_call_back(remote, remote.callback)


async def probe(messenger: Messenger, address: str) -> diagnostics.ProbeReply:
    return await call_message(
        messenger, address, "probe", None, diagnostics.ProbeReply, timeout_seconds=CALL_SECONDS
    )


def check_reached(
    remote: RemoteIsland, answers: list[diagnostics.ProbeReply | BaseException]
) -> Check:
    """Check that every rank can be called from this machine."""
    silent = [
        (rank, error) for rank, error in enumerate(answers) if isinstance(error, BaseException)
    ]
    if not silent:
        age = human_seconds(
            max(g.age_seconds for g in answers if isinstance(g, diagnostics.ProbeReply))
        )
        return Check("ok", "reach", f"{len(answers)} of {len(answers)} ranks answer; up for {age}")
    rank, error = silent[0]
    if isinstance(error, MessageError):
        text = f"rank {rank} answers, but not to the doctor: {error}; does it run an older diloco?"
        return Check("warning", "reach", text)
    cause = describe_silence(error, CALL_SECONDS)
    text = f"{len(silent)} of {len(answers)} ranks cannot be called from here; rank {rank}: {cause}"
    return Check(
        "FAILED", "reach", text if is_about_run_key(cause) else f"{text}; {reach_cure(remote)}"
    )


def reach_cure(remote: RemoteIsland) -> str:
    """Return what to change on the remote machine so that its island can be called."""
    network = remote.run.outer.network
    if network.has_daemon:
        return (
            "if it still runs, then on that machine open island.listen_port (a fixed one) and set "
            "island.announce_host to the address that others see, or set island.relay=client; an "
            "island.allow there must list this peer"
        )
    ports = f"{network.ports_per_rank} for each from island.listen_port"
    return (
        f"its record says {remote.address}: if it still runs, then on that machine open the ports "
        f"of all ranks ({ports}) and set island.announce_host to the address that others see"
    )


def check_versions(theirs: diagnostics.ProbeReply) -> Check:
    """Compare the island's software versions with those on this machine."""
    ours = diagnostics.package_versions()
    text = (
        f"{', '.join(f'{name} {number}' for name, number in theirs.versions.items())}, wire "
        f"{theirs.wire}"
    )
    others = [
        f"{n} {ours[n]}" for n, number in theirs.versions.items() if n in ours and ours[n] != number
    ]
    if not others:
        return Check("ok", "versions", f"{text}: the same as here")
    is_risk = ours.get("diloco") != theirs.versions.get("diloco")
    cure = "; use one version of diloco on all islands" if is_risk else ""
    return Check(
        "warning" if is_risk else "ok", "versions", f"{text}; here {', '.join(others)}{cure}"
    )


async def check_calls(remote: RemoteIsland) -> list[Check]:
    """Measure the round trip and compare the clocks with a few small calls. Sets
    `remote.round_trip`.
    """
    samples = [await time_call(remote) for _ in range(NUM_SAMPLES)]
    remote.round_trip = median(seconds for seconds, _ in samples)
    fastest, ahead = min(samples)
    text = f"{1000 * remote.round_trip:.1f} ms, the median of {NUM_SAMPLES} calls"
    return [Check("ok", "round trip", text), check_clock(remote, ahead, fastest / 2)]


async def time_call(remote: RemoteIsland) -> tuple[float, float]:
    """Return the duration of one call, and how far the remote clock is ahead, in seconds."""
    sent_at = time.time()
    began = time.perf_counter()
    theirs = await probe(remote.messenger, remote.address)
    seconds = time.perf_counter() - began
    return seconds, theirs.unix_time - (sent_at + seconds / 2)


def check_clock(remote: RemoteIsland, ahead: float, error: float) -> Check:
    """Check that the clocks agree closely enough for the swarm."""
    where = "ahead of" if ahead > 0 else "behind"
    text = f"{abs(ahead):.3f} s {where} this machine's, give or take {error:.3f} s"
    if abs(ahead) < CLOCK_NOTICED + error:
        return Check("ok", "clock", text)
    if not remote.run.outer.network.has_daemon:
        return Check(
            "warning",
            "clock",
            f"{text}; rounds go on, but times in logs will not match: {CLOCK_CURE}",
        )
    level = "FAILED" if abs(ahead) > CLOCK_FAILED else "warning"
    return Check(
        level, "clock", f"{text}; records in hivemind's DHT expire by the clock: {CLOCK_CURE}"
    )


async def check_rate(
    remote: RemoteIsland, name: str, transfer: Callable[[int], Awaitable[object]]
) -> Check:
    """Measure the bandwidth and estimate how long the run's state would take."""
    try:
        bytes_per_second = await measure_rate(transfer, remote.round_trip)
    except MessageError as error:
        return Check("warning", name, f"not measured: {error}")
    except OuterError as error:
        cure = (
            "small calls work and large ones do not: often the MTU of a VPN or tunnel is set "
            "too high"
        )
        return Check("FAILED", name, f"{error}; {cure}")
    text = f"{8e-6 * bytes_per_second:,.1f} Mbit/s"
    if state := state_bytes(remote.run):
        text += (
            f"; the run's state ({human_bytes(state)}) takes "
            f"{human_seconds(state / bytes_per_second)}"
        )
    return Check("ok", name, text)


async def measure_rate(transfer: Callable[[int], Awaitable[object]], round_trip: float) -> float:
    """Return the bytes per second of the first transfer that takes ENOUGH_SECONDS.

    Each transfer is larger than the one before. If none takes so long, the largest one counts.
    """
    num_bytes = FIRST_BYTES
    while True:
        began = time.perf_counter()
        await transfer(num_bytes)
        seconds = time.perf_counter() - began
        if seconds >= ENOUGH_SECONDS or num_bytes >= diagnostics.MAX_PROBE_BYTES:
            return num_bytes / max(seconds - round_trip, seconds / 2)
        num_bytes = min(num_bytes * GROWTH, diagnostics.MAX_PROBE_BYTES)


async def download_bytes(remote: RemoteIsland, num_bytes: int) -> None:
    """Request `num_bytes` bytes from the island. Raises MessageError if it sends another number."""
    reply = await remote.call_bulk(
        "probe_bytes", diagnostics.BytesRequest(num_bytes=num_bytes).encode()
    )
    if len(reply) != num_bytes:
        raise MessageError(f"it sent {len(reply)} bytes where {num_bytes} were requested")


async def check_call_back(remote: RemoteIsland, callback: CallbackListener) -> Check:
    """Check that the island can call an island on this machine over a connection that it opens
    itself.
    """
    island = remote.member.island
    address = callback.network.messenger.address
    dial = diagnostics.DialRequest(address=address)
    seconds = diagnostics.DIAL_BACK_SECONDS + CALL_SECONDS
    callback.callers.discard(island)
    try:
        call = call_message(
            remote.messenger,
            remote.address,
            "dial_back",
            dial,
            diagnostics.DialResult,
            timeout_seconds=seconds,
        )
        cause = (await call).cause
    except MessageError as error:
        return Check(
            "warning",
            "call back",
            f"not tried: {error}; if that is wrong, {call_back_cure(remote)}",
        )
    except OuterError as error:
        return Check("FAILED", "call back", str(error))
    if not cause and island in callback.callers:
        return Check("ok", "call back", f"it can call this machine at {strip_peer_ids(address)}")
    if "island.allow" in cause:
        return Check(
            "warning",
            "call back",
            "not tried: its island.allow permits no call to the doctor's peer",
        )
    cause = cause or "another peer answers there: the port leads to another machine"
    return Check(
        "FAILED",
        "call back",
        f"it cannot call {strip_peer_ids(address)}: {cause}; {call_back_cure(remote)}",
    )


def strip_peer_ids(address: str) -> str:
    """Return the network addresses in a messenger's address, without the peer ids of libp2p."""
    places = address.partition("@")[2] or address
    return ", ".join(re.sub(r"/p2p/[^/]+$", "", place) for place in places.split(";"))


def call_back_cure(remote: RemoteIsland) -> str:
    """Return what to change on this machine so that other islands can call it."""
    island = remote.local.island
    network = remote.run.outer.network
    if is_loopback(island.listen_host) and island.announce_host is None:
        return network.listening_cure
    port = f"port {island.listen_port}" if island.listen_port else "a fixed island.listen_port"
    cure = (
        f"open {port} in this machine's firewall, forward it in the router, and set "
        "island.announce_host to the "
    )
    cure += "address that others see"
    if network.has_daemon and island.relay != "client":
        cure += (
            "; or, where no port can be opened, island.relay=client, with an "
            "island.relay=server in the swarm"
        )
    return cure
