"""What `diloco doctor` finds out about one island of a run: whether both can reach each other, and how well."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from statistics import median

from diloco.checkup import SWARM_CURE, Check, Subject, connect_seconds, is_loopback, state_bytes
from diloco.config import RunConfig
from diloco.units import human_bytes, human_seconds
from outer.errors import DeadlineError, MessageError, OuterError, PeerLost
from outer.membership.base import Member, Messenger
from outer.network import Network
from outer.probe import (
    DIAL_BACK_SECONDS,
    MAX_PROBE_BYTES,
    BytesRequest,
    DialRequest,
    DialResult,
    Greeter,
    Greeting,
    versions,
)
from outer.rounds import parse
from outer.transports.base import Endpoint

CALL_SECONDS = 10.0
BULK_SECONDS = 30.0
MAX_RANKS = 64
"""Of one island; a record may speak of more, and is not to be trusted."""
NUM_SAMPLES = 5
FIRST_BYTES, GROWTH = 1 << 16, 8
ENOUGH_SECONDS = 0.5
"""A transfer that takes so long says how fast the link is; a shorter one is followed by a larger one."""
CLOCK_NOTICED, CLOCK_FAILED = 1.0, 5.0
"""Seconds. hivemind's records live for 15 s, by the clock of whoever reads them."""
CLOCK_CURE = "let both be set by NTP, for example `timedatectl set-ntp true`"


@dataclass
class Patient:
    """An island, and what it is examined with."""

    member: Member
    run: RunConfig
    messenger: Messenger
    """The doctor's own."""
    subject: Subject
    callback: "Callback | None"
    round_trip: float = 0.0
    """Seconds, once it has been measured."""

    @property
    def address(self) -> str:
        return self.member.control_addresses[0]


class Callback:
    """Where an island here would listen, and who has called."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.heard: set[str] = set()
        self._greeter = Greeter()
        network.messenger.serve("probe", self._on_probe)

    async def _on_probe(self, source: Endpoint, body: bytes) -> bytes:
        self.heard.add(source.island)
        return self._greeter.greet(body)


async def examine(patient: Patient) -> AsyncIterator[Check]:
    """All checks of one island; when it cannot be reached, that alone."""
    greetings = await greet_ranks(patient)
    yield check_reached(patient, greetings)
    first = greetings[0]
    if not isinstance(first, Greeting):
        return
    yield check_versions(first)
    if first.config_hash != patient.run.hash:
        text = (
            f"it goes by {first.config_hash}, the swarm's config has {patient.run.hash}; does it run another version?"
        )
        yield Check("warning", "config", text)
    try:
        for check in await check_calls(patient):
            yield check
    except OuterError as error:
        yield Check("FAILED", "round trip", f"it answered once, then {error}")
        return
    yield await check_rate(patient, "bandwidth down", lambda n: take_bytes(patient, n))
    yield await check_rate(patient, "bandwidth up", lambda n: give_bytes(patient, n))
    if patient.run.outer.transport == "gloo":
        yield await check_payload_ports(patient.member)
    if patient.callback is not None:
        yield await check_way_back(patient, patient.callback)


async def greet(messenger: Messenger, address: str) -> Greeting:
    """Who answers there."""
    return parse(Greeting, await messenger.call(address, "probe", b"", timeout_seconds=CALL_SECONDS))


async def greet_ranks(patient: Patient) -> list[Greeting | BaseException]:
    """What each rank answers, in rank order."""
    addresses = patient.member.control_addresses[:MAX_RANKS]
    return await asyncio.gather(*(greet(patient.messenger, a) for a in addresses), return_exceptions=True)


def check_reached(patient: Patient, greetings: list[Greeting | BaseException]) -> Check:
    """Whether every rank can be called from here."""
    silent = [(rank, error) for rank, error in enumerate(greetings) if isinstance(error, BaseException)]
    if not silent:
        age = human_seconds(max(g.age_seconds for g in greetings if isinstance(g, Greeting)))
        return Check("ok", "reach", f"{len(greetings)} of {len(greetings)} ranks answer; up for {age}")
    rank, error = silent[0]
    if isinstance(error, MessageError):
        return Check(
            "warning", "reach", f"rank {rank} answers, but not a doctor: {error}; does it run an older diloco?"
        )
    cause = cause_of(error)
    text = f"{len(silent)} of {len(greetings)} ranks cannot be called from here; rank {rank}: {cause}"
    if "run key" in cause:
        return Check("FAILED", "reach", text)
    return Check("FAILED", "reach", f"{text}; {reach_cure(patient)}")


def cause_of(error: BaseException) -> str:
    """Why a call failed, without the address, which is long."""
    if isinstance(error, DeadlineError):
        return f"no answer within {CALL_SECONDS:g} s"
    return error.cause if isinstance(error, PeerLost) else str(error) or type(error).__name__


def reach_cure(patient: Patient) -> str:
    """What to do, on the other side, about an island that cannot be called."""
    if patient.run.outer.transport == "hivemind":
        return (
            "if it still runs: there, open island.listen_port (a fixed one) and set island.announce_host to the "
            "address that others see, or island.relay=client; with island.allow there, this peer must be in it"
        )
    return (
        f"its record says {patient.address}: if it still runs, there, open the ports of all ranks "
        "(island.listen_port + rank) and set island.announce_host to the address that others see"
    )


def check_versions(theirs: Greeting) -> Check:
    """What it runs on, and what of that is another version than here."""
    ours = versions()
    text = f"{', '.join(f'{name} {number}' for name, number in theirs.versions.items())}, wire {theirs.wire}"
    others = [f"{n} {ours[n]}" for n, number in theirs.versions.items() if n in ours and ours[n] != number]
    if not others:
        return Check("ok", "versions", f"{text}: as here")
    is_risk = ours.get("diloco") != theirs.versions.get("diloco")
    cure = "; use one version of diloco on all islands" if is_risk else ""
    return Check("warning" if is_risk else "ok", "versions", f"{text}; here {', '.join(others)}{cure}")


async def check_calls(patient: Patient) -> list[Check]:
    """Round trip and clock, of a few small calls."""
    samples = [await sample(patient) for _ in range(NUM_SAMPLES)]
    patient.round_trip = median(seconds for seconds, _ in samples)
    fastest, ahead = min(samples)
    text = f"{1000 * patient.round_trip:.1f} ms, the median of {NUM_SAMPLES} calls"
    return [Check("ok", "round trip", text), check_clock(patient, ahead, fastest / 2)]


async def sample(patient: Patient) -> tuple[float, float]:
    """Seconds of one call, and by how many its clock is ahead."""
    sent_at, began = time.time(), time.perf_counter()
    theirs = await greet(patient.messenger, patient.address)
    seconds = time.perf_counter() - began
    return seconds, theirs.unix_time - (sent_at + seconds / 2)


def check_clock(patient: Patient, ahead: float, error: float) -> Check:
    """Whether its clock and ours agree as well as the swarm needs it."""
    where = "ahead of" if ahead > 0 else "behind"
    text = f"{abs(ahead):.3f} s {where} this machine's, give or take {error:.3f} s"
    if abs(ahead) < CLOCK_NOTICED + error:
        return Check("ok", "clock", text)
    if patient.run.outer.transport != "hivemind":
        return Check("warning", "clock", f"{text}; gloo does not mind, but logs will not fit together: {CLOCK_CURE}")
    level = "FAILED" if abs(ahead) > CLOCK_FAILED else "warning"
    return Check(level, "clock", f"{text}; records in hivemind's DHT expire by the clock: {CLOCK_CURE}")


async def check_rate(patient: Patient, name: str, transfer: Callable[[int], Awaitable[None]]) -> Check:
    """How fast larger and larger transfers go, and what the run's state would take."""
    try:
        bytes_per_second = await rate_of(transfer, patient.round_trip)
    except MessageError as error:
        return Check("warning", name, f"not measured: {error}")
    except OuterError as error:
        cure = "small calls pass and large ones do not: often the MTU of a VPN or tunnel is set too high"
        return Check("FAILED", name, f"{error}; {cure}")
    state = state_bytes(patient.run)
    what = f"; the run's state ({human_bytes(state)}) in {human_seconds(state / bytes_per_second)}" if state else ""
    return Check("ok", name, f"{8e-6 * bytes_per_second:,.1f} Mbit/s{what}")


async def rate_of(transfer: Callable[[int], Awaitable[None]], round_trip: float) -> float:
    """Bytes a second of the first transfer that takes long enough, or of the largest."""
    num_bytes = FIRST_BYTES
    while True:
        began = time.perf_counter()
        await transfer(num_bytes)
        seconds = time.perf_counter() - began
        if seconds >= ENOUGH_SECONDS or num_bytes >= MAX_PROBE_BYTES:
            return num_bytes / max(seconds - round_trip, seconds / 2)
        num_bytes = min(num_bytes * GROWTH, MAX_PROBE_BYTES)


async def take_bytes(patient: Patient, num_bytes: int) -> None:
    """Let the island send so many."""
    body = BytesRequest(num_bytes=num_bytes).model_dump_json().encode()
    call = patient.messenger.call
    reply = await call(patient.address, "probe_bytes", body, timeout_seconds=BULK_SECONDS, lane="bulk")
    if len(reply) != num_bytes:
        raise MessageError(f"it sent {len(reply)} bytes where {num_bytes} were asked for")


async def give_bytes(patient: Patient, num_bytes: int) -> None:
    """Send it so many."""
    call = patient.messenger.call
    await call(patient.address, "probe_sink", bytes(num_bytes), timeout_seconds=BULK_SECONDS, lane="bulk")


async def check_payload_ports(member: Member) -> Check:
    """Whether the port of each rank where gloo's groups are built takes connections."""
    from outer.transports.gloo_groups import parse_address

    addresses = member.transport_addresses[:MAX_RANKS]
    for rank, address in enumerate(addresses):
        try:
            host, port = parse_address(Endpoint(member.island, rank), address)
        except PeerLost as error:
            return Check("FAILED", "payload ports", f"rank {rank}: {error.cause}")
        _, problem = await connect_seconds(host, port)
        if problem:
            cure = "gloo takes ports of its own choice: let islands reach each other on all, or use hivemind"
            return Check("FAILED", "payload ports", f"rank {rank}, {host}:{port}: {problem}; {cure}")
    return Check("ok", "payload ports", f"{len(addresses)} of {len(addresses)} ranks take connections for gloo")


async def check_way_back(patient: Patient, callback: Callback) -> Check:
    """Whether the island can call an island here, on a connection that it opens itself."""
    island, address = patient.member.island, callback.network.messenger.address
    body = DialRequest(address=address).model_dump_json().encode()
    callback.heard.discard(island)
    try:
        seconds = DIAL_BACK_SECONDS + CALL_SECONDS
        reply = await patient.messenger.call(patient.address, "dial_back", body, timeout_seconds=seconds)
        cause = parse(DialResult, reply).cause
    except MessageError as error:
        return Check("warning", "way back", f"not tried: {error}")
    except OuterError as error:
        return Check("FAILED", "way back", str(error))
    if not cause and island in callback.heard:
        return Check("ok", "way back", f"it can call this machine at {places_of(address)}")
    if "island.allow" in cause:
        return Check("warning", "way back", "not tried: its island.allow takes no call to the doctor's peer")
    cause = cause or "somebody else answers there: the port leads to another machine"
    return Check("FAILED", "way back", f"it cannot call {places_of(address)}: {cause}; {way_back_cure(patient)}")


def places_of(address: str) -> str:
    """Where a messenger's address leads, without the peer ids of libp2p."""
    places = address.partition("@")[2] or address
    return ", ".join(re.sub(r"/p2p/[^/]+$", "", place) for place in places.split(";"))


def way_back_cure(patient: Patient) -> str:
    """What to do, on this side, about islands that cannot call this one."""
    island, transport = patient.subject.island, patient.run.outer.transport
    if is_loopback(island.listen_host) and island.announce_host is None:
        return SWARM_CURE[transport]
    port = f"port {island.listen_port}" if island.listen_port else "a fixed island.listen_port"
    cure = f"open {port} in this machine's firewall, forward it in the router, and set island.announce_host to the "
    cure += "address that others see"
    if transport == "hivemind" and island.relay != "client":
        cure += "; or, where no port can be opened, island.relay=client, with an island.relay=server in the swarm"
    return cure
