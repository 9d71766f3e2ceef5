"""How much of an island's time computes, before anything is launched: this trainer's rounds on a link.

    inner steps      | snapshot | round: plan, reduce, vote, outer step | write back |  inner steps ...
    with a delay     | snapshot | inner steps ........................ rest of it | write back |  inner steps ...

A round sends one fragment; `inner_steps` inner steps and as many rounds as there are fragments are a cycle, after
which every parameter has been averaged once. One round is on its way at a time. utilisation.py is the published
model, which knows of none of these terms but the first two.
"""

from dataclasses import dataclass, replace
from math import ceil, log2

from diloco.planning.round_bytes import Fragment, fragments_of
from diloco.planning.specs import Spec, num_elements
from outer.config import GATHERED, OuterConfig

CONTROL_TRIPS = 2.0
"""Round trips of a round in which nothing is sent: ready, plan, vote and its receipt, one way each."""
PAYLOAD_TRIPS = 1.0
"""There with a part, back with its mean."""
PAYLOAD_SHARE = {"gloo": 0.94, "hivemind": 0.91, "loopback": 1.0}
"""Of a link's rate, measured at 100 Mbit/s; headers of frames with 1448 bytes of payload alone leave 0.956."""
MANY_PEERS_SHARE = 0.96
"""Of that, with more than one peer: now and then a link waits for another."""
ROUND_MESSAGES = 15
"""What ready, plan and vote, and a thread for the round, take of the host, in payloads."""
FIRST_WINDOW_BYTES = 10 * 1448
"""What TCP sends to a peer before it has heard anything, also after a pause; it doubles with each round trip."""


@dataclass(frozen=True)
class Link:
    """Of an island, each direction for itself. `payload_share` None: as measured for the transport."""

    bits_per_second: float
    rtt_seconds: float = 0.0
    payload_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class HostSpeed:
    """Seconds an element (digest: a byte) that one core takes for the outer loop's own work."""

    encode: float
    decode: float
    merge: float
    """Adding one participant's values to a sum."""
    snapshot: float
    """Copying local params, and the difference to the global ones."""
    step: float
    """The outer step, and the digest of the new state."""
    write: float
    """Global params into local params."""
    digest: float
    message: float = 0.0
    """Seconds a payload, sent or received: from thread to thread and through the system, while no link is busy."""

    def shared(self, ranks: float) -> "HostSpeed":
        """As it is where so many ranks share a core."""
        return HostSpeed(**{name: seconds * ranks for name, seconds in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is asked about: a run's outer loop on equal links."""

    outer: OuterConfig
    specs: tuple[Spec, ...]
    num_islands: int
    step_seconds: float
    """Of one inner step on the fastest island."""
    link: Link
    speed: HostSpeed
    ranks: int = 1
    """Of an island: they share the host's work."""
    spread: float = 0.0
    """How much longer the slowest island's inner steps are: 0.1 for 10 %."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One cycle: seconds of an island, in which `inner_steps` inner steps are done. Terms are what adds to the time.

    The mean over cycles, where moments make some of them longer.
    """

    compute_seconds: float
    transfer_seconds: float
    """2 (M - 1) / M x payload, each way, at the rate that payloads get."""
    trip_seconds: float
    """Control messages, a part's way there and back, TCP's slow start, and the host's time for each payload."""
    codec_seconds: float
    """Encoding, decoding, merging: what the transfer does not cover."""
    step_seconds: float
    """Outer step and digest."""
    copy_seconds: float
    """Snapshot, and writing back: never hidden."""
    spread_seconds: float
    """Waiting for the slowest island."""
    hidden_seconds: float
    """Of rounds, behind inner steps; not in the terms above."""
    sent_bytes: float
    """By an island, on average."""
    num_params: int
    inner_steps: int
    busy_transfer_seconds: float
    """What the transfer takes by itself, hidden or not."""
    busy_codec_seconds: float
    """What encoding, decoding and merging take by themselves."""

    @property
    def total_seconds(self) -> float:
        rounds = self.transfer_seconds + self.trip_seconds + self.codec_seconds + self.step_seconds
        return self.compute_seconds + rounds + self.copy_seconds + self.spread_seconds

    @property
    def utilisation(self) -> float:
        """Share of the time that an island computes."""
        return self.compute_seconds / self.total_seconds

    @property
    def bits_per_param_step(self) -> float:
        """Sent by an island, for each parameter and inner step."""
        return 8 * self.sent_bytes / self.num_params / self.inner_steps

    @property
    def is_codec_slower(self) -> bool:
        """Whether the link waits for the codec."""
        return self.busy_codec_seconds > self.busy_transfer_seconds > 0


def predict(case: Case) -> Prediction:
    """A cycle's time, term by term. Raises InputError when the model cannot be cut into the fragments."""
    if case.outer.gossip is not None:
        # To an island there are no others in a round than its group.
        case = replace(case, num_islands=min(case.outer.gossip.group, case.num_islands))
    outer, fragments = case.outer, fragments_of(case.outer, case.specs, case.num_islands)
    steps = steps_of(case)
    # In steady state all islands go at the slowest's pace; with dynamic or timed local steps it makes fewer of them.
    spread = case.spread if outer.local_steps == "fixed" else 0.0
    hiding = outer.delay * case.step_seconds * (1 + spread)
    terms = [0.0, 0.0, 0.0, 0.0]
    hidden = 0.0
    for fragment in fragments:
        parts = _round(case, fragment)
        left = max(0.0, sum(parts) - hiding) / sum(parts) if sum(parts) else 0.0
        hidden += (1 - left) * sum(parts)
        terms = [term + left * part for term, part in zip(terms, parts, strict=True)]
    cycles = len(fragments) // outer.fragments
    terms, hidden = [term / cycles for term in terms], hidden / cycles
    moved = sum(fragment.num_elements for fragment in fragments) / cycles
    return Prediction(
        compute_seconds=steps * case.step_seconds,
        transfer_seconds=terms[0],
        trip_seconds=terms[1],
        codec_seconds=terms[2],
        step_seconds=terms[3],
        copy_seconds=moved * (case.speed.snapshot + case.speed.write) / case.ranks,
        spread_seconds=steps * case.step_seconds * spread,
        hidden_seconds=hidden,
        sent_bytes=sum(fragment.sent_bytes for fragment in fragments) / cycles,
        num_params=num_elements(case.specs),
        inner_steps=steps,
        busy_transfer_seconds=sum(_transfer_seconds(case, fragment) for fragment in fragments) / cycles,
        busy_codec_seconds=sum(_codec_seconds(case, fragment) for fragment in fragments) / cycles,
    )


def steps_of(case: Case) -> int:
    """Inner steps of a cycle on the fastest island: the config's, or fewer where timed rounds have no time for them."""
    outer = case.outer
    if outer.round_seconds is None:
        return outer.inner_steps
    return min(outer.inner_steps, ceil(outer.round_seconds / case.step_seconds) * outer.fragments)


def _round(case: Case, fragment: Fragment) -> tuple[float, float, float, float]:
    """Seconds of what a delay can hide: transfer, round trips, codec beyond the transfer, outer step."""
    transfer, codec = _transfer_seconds(case, fragment), _codec_seconds(case, fragment)
    trips = (CONTROL_TRIPS + PAYLOAD_TRIPS) * case.link.rtt_seconds if case.num_islands > 1 else 0.0
    # Parts are coded while others travel; but for the first on its way out, and the last on its way in.
    beyond = max(codec - transfer, 0.0) + min(codec, transfer) / fragment.num_parts
    step = fragment.num_elements * case.speed.step / case.ranks
    return transfer, trips + _slow_start_seconds(case, fragment) + _message_seconds(case, fragment), beyond, step


def _transfer_seconds(case: Case, fragment: Fragment) -> float:
    return 0.0 if case.num_islands == 1 else 8 * (fragment.most_bytes + fragment.last_bytes) / _payload_rate(case)


def _payload_rate(case: Case) -> float:
    """Bits of payload a second that an island sends."""
    share = case.link.payload_share
    if share is None:
        share = PAYLOAD_SHARE[case.outer.transport] * (MANY_PEERS_SHARE if case.num_islands > 2 else 1.0)
    return case.link.bits_per_second * share


def _message_seconds(case: Case, fragment: Fragment) -> float:
    """What the host takes to pass on payloads: a part's go out and come in, with all peers or as their reducer."""
    peers = case.num_islands - 1
    a_part = 2 * peers if _is_gathered(case.outer) else 4 * peers / case.num_islands
    return case.speed.message * (fragment.num_parts * a_part / case.ranks + ROUND_MESSAGES) if peers else 0.0


def _slow_start_seconds(case: Case, fragment: Fragment) -> float:
    """What a round loses before its connections have found the link's rate: after a pause they begin anew."""
    peers, rtt = case.num_islands - 1, case.link.rtt_seconds
    first = FIRST_WINDOW_BYTES * peers * case.ranks
    in_flight = min(_payload_rate(case) * rtt / 8, fragment.most_bytes)
    if peers == 0 or in_flight <= first:
        return 0.0
    doublings = log2(in_flight / first)
    return rtt * (doublings - (1 - first / in_flight))


def _codec_seconds(case: Case, fragment: Fragment) -> float:
    """One rank's share of an island's coding: on a core of its own."""
    speed, islands, elements = case.speed, case.num_islands, fragment.num_elements
    is_gathered = _is_gathered(case.outer)
    # Its own values; and of its share of the parts, as their reducer, everybody's, and the mean.
    encodes = 1.0 if is_gathered else 1 + 1 / islands
    decodes = float(islands) if is_gathered else 2.0
    merges = float(islands) if is_gathered else 1.0
    if case.outer.coding.feedback is not None:
        decodes, merges = decodes + encodes, merges + 2 * encodes
    per_element = encodes * speed.encode + decodes * speed.decode + merges * speed.merge
    return (elements * per_element + fragment.mean_bytes * speed.digest) / case.ranks


def _is_gathered(outer: OuterConfig) -> bool:
    """Whether everybody gets everybody's payloads, so that there is no reducer."""
    return outer.codec in GATHERED or outer.gossip is not None
