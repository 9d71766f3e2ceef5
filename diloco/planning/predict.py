"""Predict the compute utilisation of a run from its config: this trainer's rounds over links of a
given speed.

    inner steps  | snapshot | round: plan, reduce, vote, outer step | write back | inner steps
    with a delay | snapshot | inner steps .................... rest of it | write back | inner steps

A round sends one fragment. A cycle is `inner_steps` inner steps with one round for each fragment,
after which every parameter has been averaged once. One round is in flight at a time. utilisation.py
has the published model, which includes only the inner steps and the transfer.
"""

from dataclasses import dataclass, replace
from math import ceil, log2

from inner.measure.param_specs import num_elements
from inner.param_spec import ParamSpec
from outer.codecs.choice import build_codec_choice
from outer.config import OuterConfig
from outer.cost import HostSpeed, RoundBytes, round_bytes

CONTROL_TRIPS = 2.0
"""Round trips of control messages in a round: ready, plan, vote and its receipt are half a round
trip each.
"""
PAYLOAD_TRIPS = 1.0
"""Round trips of payloads in a round: a part goes to its reducer and its mean comes back."""
MANY_PEERS_SHARE = 0.90
"""Further factor for more than one peer: connections share a link unevenly, and islands wait for
the slow connections."""
ROUND_MESSAGES = 15
"""Host time of a round's ready, plan, vote and background thread, as a multiple of one payload's
host time."""
FIRST_WINDOW_BYTES = 10 * 1448
"""Bytes that TCP sends before the first acknowledgement, also after a pause. The window doubles per
round trip."""


@dataclass(frozen=True)
class LinkSpeed:
    """An island's link. It carries `bits_per_second` in each direction at the same time."""

    bits_per_second: float
    rtt_seconds: float = 0.0
    payload_share: float | None = None
    """Share of the rate that payloads get; None uses the share measured for the transport."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The run to predict: its outer loop, on links of equal speed."""

    outer: OuterConfig
    specs: tuple[ParamSpec, ...]
    num_islands: int
    step_seconds: float
    """Duration of one inner step on the fastest island."""
    link: LinkSpeed
    speed: HostSpeed
    ranks: int = 1
    """Ranks of an island, which share the host's work."""
    spread: float = 0.0
    """How much longer inner steps take on the slowest island: 0.1 for 10 %."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Prediction for one cycle of an island. The terms, `compute_seconds` to `spread_seconds`, add
    up to its duration.

    Where moments make some cycles longer than others, every value is a mean over cycles.
    """

    compute_seconds: float
    transfer_seconds: float
    """Duration of 2 (M - 1) / M x payload in each direction for M islands, at the rate that
    payloads get."""
    trip_seconds: float
    """Round trips of control messages and payloads, TCP's slow start, and the host's time for each
    payload.
    """
    codec_seconds: float
    """Encoding, decoding and merging that does not overlap with the transfer."""
    step_seconds: float
    """Outer step and digest."""
    copy_seconds: float
    """Taking the snapshot and writing values back, which a delay never hides."""
    spread_seconds: float
    """Waiting for the slowest island."""
    hidden_seconds: float
    """Round time hidden behind inner steps; not in the terms above."""
    sent_bytes: float
    """Bytes that an island sends per cycle, on average."""
    num_params: int
    inner_steps: int
    busy_transfer_seconds: float
    """Duration of the transfer alone, hidden or not."""
    busy_codec_seconds: float
    """Duration of encoding, decoding and merging alone, hidden or not."""

    @property
    def total_seconds(self) -> float:
        rounds = self.transfer_seconds + self.trip_seconds + self.codec_seconds + self.step_seconds
        return self.compute_seconds + rounds + self.copy_seconds + self.spread_seconds

    @property
    def utilisation(self) -> float:
        """Share of the time that an island spends on inner steps."""
        return self.compute_seconds / self.total_seconds

    @property
    def bits_per_param_step(self) -> float:
        """Bits that an island sends per parameter and inner step."""
        return 8 * self.sent_bytes / self.num_params / self.inner_steps

    @property
    def is_codec_slower(self) -> bool:
        """Whether the link has to wait for the codec."""
        return self.busy_codec_seconds > self.busy_transfer_seconds > 0


def predict(case: Case) -> Prediction:
    """Predict a cycle term by term. Raises InputError when the model has too few layers for the
    fragments.
    """
    if case.outer.gossip is not None:
        # A round of gossip involves only the members of one gossip group.
        case = replace(case, num_islands=min(case.outer.gossip.group, case.num_islands))
    outer = case.outer
    rounds = round_bytes(case.outer, case.specs, case.num_islands)
    steps = count_steps(case)
    # In steady state all islands keep the pace of the slowest. With dynamic or timed local steps,
    # the slowest makes fewer.
    spread = case.spread if outer.local_steps == "fixed" else 0.0
    hideable = outer.delay * case.step_seconds * (1 + spread)
    terms = [0.0, 0.0, 0.0, 0.0]
    hidden = 0.0
    for sent in rounds:
        seconds = _round_seconds(case, sent)
        visible = max(0.0, sum(seconds) - hideable) / sum(seconds) if sum(seconds) else 0.0
        hidden += (1 - visible) * sum(seconds)
        terms = [term + visible * part for term, part in zip(terms, seconds, strict=True)]
    cycles = len(rounds) // outer.fragments
    terms = [term / cycles for term in terms]
    hidden = hidden / cycles
    num_copied = sum(sent.num_elements for sent in rounds) / cycles
    return Prediction(
        compute_seconds=steps * case.step_seconds,
        transfer_seconds=terms[0],
        trip_seconds=terms[1],
        codec_seconds=terms[2],
        step_seconds=terms[3],
        copy_seconds=num_copied * (case.speed.snapshot + case.speed.write) / case.ranks,
        spread_seconds=steps * case.step_seconds * spread,
        hidden_seconds=hidden,
        sent_bytes=sum(sent.sent_bytes for sent in rounds) / cycles,
        num_params=num_elements(case.specs),
        inner_steps=steps,
        busy_transfer_seconds=sum(_transfer_seconds(case, sent) for sent in rounds) / cycles,
        busy_codec_seconds=sum(_codec_seconds(case, sent) for sent in rounds) / cycles,
    )


def count_steps(case: Case) -> int:
    """Return the inner steps of a cycle on the fastest island: `inner_steps`, or fewer if timed
    rounds end earlier.
    """
    outer = case.outer
    if outer.round_seconds is None:
        return outer.inner_steps
    return min(outer.inner_steps, ceil(outer.round_seconds / case.step_seconds) * outer.fragments)


def _round_seconds(case: Case, sent: RoundBytes) -> tuple[float, float, float, float]:
    """Return the parts of a round that a delay can hide, in seconds.

    These are the transfer, the round trips, the codec work beyond the transfer, and the outer step.
    """
    transfer = _transfer_seconds(case, sent)
    codec = _codec_seconds(case, sent)
    trips = (CONTROL_TRIPS + PAYLOAD_TRIPS) * case.link.rtt_seconds if case.num_islands > 1 else 0.0
    # Coding overlaps with the transfer of other parts, except for the first part sent and the last
    # part received.
    beyond = max(codec - transfer, 0.0) + min(codec, transfer) / sent.num_parts
    step = sent.num_elements * case.speed.step / case.ranks
    return (
        transfer,
        trips + _slow_start_seconds(case, sent) + _message_seconds(case, sent),
        beyond,
        step,
    )


def _transfer_seconds(case: Case, sent: RoundBytes) -> float:
    return (
        0.0
        if case.num_islands == 1
        else 8 * (sent.most_bytes + sent.last_bytes) / _payload_rate(case)
    )


def _payload_rate(case: Case) -> float:
    """Return the bits of payload that an island sends per second."""
    share = case.link.payload_share
    if share is None:
        share = find_payload_share(case.outer, case.num_islands)
    return case.link.bits_per_second * share


def find_payload_share(outer: OuterConfig, num_islands: int) -> float:
    """Return the measured share of a link's rate that payloads get."""
    return outer.network.payload_share * (MANY_PEERS_SHARE if num_islands > 2 else 1.0)


def _message_seconds(case: Case, sent: RoundBytes) -> float:
    """Return the host time for handling payloads. A part's payloads are exchanged with all peers or
    with its reducer.
    """
    peers = case.num_islands - 1
    per_part = 2 * peers if _is_gathered(case.outer) else 4 * peers / case.num_islands
    return (
        case.speed.message * (sent.num_parts * per_part / case.ranks + ROUND_MESSAGES)
        if peers
        else 0.0
    )


def _slow_start_seconds(case: Case, sent: RoundBytes) -> float:
    """Return the time lost to TCP's slow start, which begins again in each round because
    connections pause in between.
    """
    peers = case.num_islands - 1
    rtt = case.link.rtt_seconds
    first = FIRST_WINDOW_BYTES * peers * case.ranks
    in_flight = min(_payload_rate(case) * rtt / 8, sent.most_bytes)
    if peers == 0 or in_flight <= first:
        return 0.0
    doublings = log2(in_flight / first)
    return rtt * (doublings - (1 - first / in_flight))


def _codec_seconds(case: Case, sent: RoundBytes) -> float:
    """Return the time of one rank for coding and merging. It has its own core and an equal share of
    the island's work.
    """
    speed = case.speed
    islands = case.num_islands
    elements = sent.num_elements
    is_gathered = _is_gathered(case.outer)
    # An island encodes its own values. As the reducer of 1/M of the parts it also decodes the
    # values of all M islands and encodes the mean. It decodes all means.
    encodes = 1.0 if is_gathered else 1 + 1 / islands
    decodes = float(islands) if is_gathered else 2.0
    merges = float(islands) if is_gathered else 1.0
    if case.outer.coding.feedback is not None:
        decodes = decodes + encodes
        merges = merges + 2 * encodes
    per_element = encodes * speed.encode + decodes * speed.decode + merges * speed.merge
    return (elements * per_element + sent.mean_bytes * speed.digest) / case.ranks


def _is_gathered(outer: OuterConfig) -> bool:
    """Return whether every island receives all payloads, so that parts have no reducer."""
    return build_codec_choice(outer).is_gathered or outer.gossip is not None
