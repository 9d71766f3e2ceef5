"""The cost of a round: its bytes, the host memory of the outer loop, and the speed of its work on
this machine.

Bytes are counted on the parts themselves, so they equal the bytes of a real run. Nothing is
launched.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import lcm, prod

import torch

from outer.codecs import build_codec
from outer.codecs.base import Codec
from outer.codecs.cast import Fp32Codec
from outer.codecs.choice import CodecChoice, build_codec_choice, build_space
from outer.config import OuterConfig
from outer.merges.geometry import sum_of_squares
from outer.merges.mean import WeightedSum
from outer.reduce.auditor import audit_rate
from outer.reduce.reducer import PARTS_IN_FLIGHT
from outer.space.digest import part_digest
from outer.space.layout import Part, TensorSpec
from outer.state.global_state import LOG_BYTES_PER_PARAM
from outer.state.optimizer import OuterOptimizer

FP32_BYTES = 4
MEASURE_SECONDS = 0.02
"""Time spent measuring each kind of work."""
MAX_ELEMENTS = 1 << 18
COPIED_ELEMENTS = 1 << 22
"""Number of elements copied when copies are measured. Like a model, they do not fit into the
processor's cache."""
MESSAGE_SECONDS = 0.0004
"""Host time per payload in seconds. It was measured once, on a virtual machine over gloo,
because the measurement needs several processes."""


@dataclass(frozen=True)
class RoundBytes:
    """Payload bytes of one round, which sends one fragment."""

    num_elements: int
    num_parts: int
    sent_bytes: float
    """Bytes that an island sends, on average."""
    most_bytes: int
    """Bytes that the island which sends most sends."""
    last_bytes: int
    """Bytes that a reducer sends after everything else has arrived: the mean of its last part,
    to every other island."""
    mean_bytes: int
    """Size of all means as they are sent, in bytes."""
    payload_bytes: int
    """Size of an island's contribution, encoded once, in bytes."""


def round_bytes(
    outer: OuterConfig, specs: tuple[TensorSpec, ...], num_islands: int
) -> Sequence[RoundBytes]:
    """Return the bytes of each round of one cycle, or of several cycles if moments or experts are
    not sent in each.

    Raises InputError when the model has too few layers for the configured fragments.
    """
    # Bytes do not depend on when a round is sent, so configs that differ only in timing share a
    # cache entry.
    untimed = {
        "inner_steps": outer.fragments,
        "delay": 0,
        "eager": False,
        "rounds": outer.experts.every,
    }
    return _round_bytes(outer.model_copy(update=untimed).model_dump_json(), specs, num_islands)


@lru_cache(maxsize=64)
def _round_bytes(
    outer_json: str, specs: tuple[TensorSpec, ...], num_islands: int
) -> Sequence[RoundBytes]:
    outer = OuterConfig.model_validate_json(outer_json)
    codecs = build_codec_choice(outer)
    space = build_space(specs, outer, codecs)
    if outer.gossip is not None:
        params = build_codec(outer.gossip.params)
        peers = min(outer.gossip.group, num_islands) - 1
        return [_gossip_bytes(space.parts, codecs, params, peers)]
    rounds = lcm(*(outer.moments or (1,)), outer.experts.every) * outer.fragments
    sent = (
        [i for group in space.part_groups_in(number) for i in space.parts_in[group]]
        for number in range(rounds)
    )
    audits = _count_audits(outer, num_islands)
    return [
        _reduce_bytes([space.parts[i] for i in indices], codecs, num_islands, audits)
        for indices in sent
    ]


def bytes_by_tensor(
    outer: OuterConfig, specs: Sequence[TensorSpec], num_islands: int
) -> dict[str, float]:
    """Return the bytes that an island sends per cycle of each tensor, by name: the mean over
    islands, and over cycles if it is not sent in each. Only for rounds of all islands.
    """
    codecs = build_codec_choice(outer)
    space = build_space(specs, outer, codecs)
    audits = _count_audits(outer, num_islands)
    sent = dict.fromkeys(space.names, 0.0)
    for part in space.parts:
        of_part = _reduce_bytes([part], codecs, num_islands, audits).sent_bytes
        per_element = of_part / part.num_elements / space.part_groups[part.part_group].period
        for name, num_elements in space.names_in(part):
            sent[name] += per_element * num_elements
    return sent


def _count_audits(outer: OuterConfig, num_islands: int) -> float:
    """Return how often a part is audited on average."""
    return outer.audit and (num_islands - 1) * audit_rate(outer.audit, num_islands)


def _gossip_bytes(
    parts: Sequence[Part], codecs: CodecChoice, params: Codec, peers: int
) -> RoundBytes:
    """Count a gossip round: each of `peers` islands gets the pseudo-gradient and the params of
    every part.
    """
    payloads = sum(
        codecs.codec_for(p).num_bytes(p.num_elements) + params.num_bytes(p.num_elements)
        for p in parts
    )
    num_elements = sum(part.num_elements for part in parts)
    return RoundBytes(
        num_elements, len(parts), peers * payloads, peers * payloads, 0, payloads, payloads
    )


def _reduce_bytes(
    parts: Sequence[Part], codecs: CodecChoice, num_islands: int, audits: float
) -> RoundBytes:
    """Count an agreed round: a part's payloads go to its reducer, which sends its mean to all.

    Gathered payloads go from all islands to all. Every other part is audited `audits` times on
    average; in each audit its reducer sends all its payloads.
    """
    peers = num_islands - 1
    by_all = last_bytes = mean_bytes = payload_bytes = 0
    as_reducer = [0] * num_islands
    for part in parts:
        payload = codecs.codec_for(part).num_bytes(part.num_elements)
        mean = codecs.mean_codec_for(part).num_bytes(part.num_elements)
        mean_bytes += mean
        payload_bytes += payload
        if codecs.gathers(part):
            by_all += peers * payload
        else:
            by_all += payload
            as_reducer[part.index % num_islands] += (
                peers * mean - payload + round(audits * num_islands * payload)
            )
            last_bytes = peers * mean
    sent = [by_all + own for own in as_reducer]
    num_elements = sum(part.num_elements for part in parts)
    sent_bytes = sum(sent) / num_islands
    return RoundBytes(
        num_elements, len(parts), sent_bytes, max(sent), last_bytes, mean_bytes, payload_bytes
    )


def memory_bytes(
    outer: OuterConfig, specs: tuple[TensorSpec, ...], num_islands: int, num_ranks: int
) -> dict[str, float]:
    """Return the bytes of host memory of the outer loop on one rank, by purpose. Ranks carry equal
    shares of the parts.

    The sum is in use from the first round on, because a round's memory is kept for the next one.
    Arriving payloads, payloads kept for audits and means for joiners may need less. Local params
    are not included. Raises InputError like `round_bytes`.
    """
    num_params = sum(prod(spec.shape) for spec in specs) / num_ranks
    num_moments = 2 * num_params if outer.moments else 0
    memory = {"global params": FP32_BYTES * num_params}
    if num_moments:
        memory["averaged moments"] = FP32_BYTES * num_moments
    has_momentum = outer.gossip.momentum > 0 if outer.gossip else outer.optimizer.keeps_momentum
    if has_momentum:
        memory["outer momentum"] = FP32_BYTES * num_params
    if outer.merge.needs_last_mean:
        memory["last mean"] = FP32_BYTES * num_params
    rounds = round_bytes(outer, specs, num_islands)
    largest = max(rounds, key=lambda each: each.num_elements)
    memory |= {
        name: size / num_ranks
        for name, size in _memory_of_a_round(outer, largest, num_islands, num_ranks).items()
    }
    if outer.coding.feedback is not None:
        # Until the commit the old residuals are kept beside the new ones.
        residuals = FP32_BYTES * (1 + 1 / num_islands)
        memory["residuals of coding"] = residuals * (num_params + largest.num_elements / num_ranks)
    of_all_rounds = (
        outer.rounds
        * outer.fragments
        * sum(each.mean_bytes for each in rounds)
        / len(rounds)
        / num_ranks
    )
    memory["means for joiners"] = min(
        LOG_BYTES_PER_PARAM * (num_params + num_moments), of_all_rounds
    )
    return memory


def moving_bytes(
    outer: OuterConfig,
    specs: tuple[TensorSpec, ...],
    num_islands: int,
    num_ranks: int,
    *,
    is_copied: bool,
) -> float:
    """Return the most bytes of host memory that one rank needs, besides `memory_bytes`, while
    slices become parts.

    They are needed only for a short time. Slices are copied to the host if they are on another
    device (`is_copied`). The data for other ranks are in one tensor, and the data from other ranks
    in another one.
    """
    largest = max(sent.num_elements for sent in round_bytes(outer, specs, num_islands))
    return FP32_BYTES * largest / num_ranks * (is_copied + 2 * (1 - 1 / num_ranks))


def _memory_of_a_round(
    outer: OuterConfig, sizes: RoundBytes, num_islands: int, num_ranks: int
) -> dict[str, float]:
    """Return the bytes of an island during a round, by purpose."""
    codecs = build_codec_choice(outer)
    peers = num_islands - 1
    memory: dict[str, float] = {"a round's snapshot": FP32_BYTES * sizes.num_elements}
    if outer.gossip is not None:
        # The island's own share in encoded form, and both tensors of every member's share in
        # decoded form.
        group_size = min(outer.gossip.group, num_islands)
        memory["a round's means"] = FP32_BYTES * sizes.num_elements
        memory["shares of a group"] = (
            2 * FP32_BYTES * group_size * sizes.num_elements + sizes.mean_bytes
        )
        return memory
    # Means in fp32 are used in place. Other means are decoded, while the encoded form is kept for
    # joiners.
    is_fp32 = isinstance(codecs.mean, Fp32Codec)
    memory["a round's means"] = sizes.mean_bytes + (
        0 if is_fp32 else FP32_BYTES * sizes.num_elements
    )
    in_flight = min(1.0, PARTS_IN_FLIGHT * num_ranks / sizes.num_parts)
    reduced = peers if codecs.is_gathered else peers / num_islands
    memory["payloads that arrive"] = sizes.payload_bytes * reduced * in_flight
    if outer.audit > 0:
        memory["payloads kept for audits"] = sizes.mean_bytes
    return memory


@dataclass(frozen=True, kw_only=True)
class HostSpeed:
    """Seconds per element (digest: per byte) that one core needs for the outer loop's own work."""

    encode: float
    decode: float
    merge: float
    """Time to add one participant's values to a sum."""
    snapshot: float
    """Time to copy local params, and to subtract them from the global params."""
    step: float
    """Time of the outer step, and of the digest of the new state."""
    write: float
    """Time to copy global params into local params."""
    digest: float
    message: float = 0.0
    """Seconds per payload sent or received that are spent in threads and system calls while no
    link is busy."""


def measure_host_speed(outer: OuterConfig) -> HostSpeed:
    """Measure the run's codec and optimizer on an idle core of this machine. Takes 0.25 s;
    results are cached.
    """
    used = {"codec": outer.codec, "coding": outer.coding, "optimizer": outer.optimizer}
    part_elements = min(outer.part_elements or MAX_ELEMENTS, MAX_ELEMENTS)
    return _measure_cached(OuterConfig(part_elements=part_elements, **used).model_dump_json())


@cache
def _measure_cached(outer_json: str) -> HostSpeed:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(OuterConfig.model_validate_json(outer_json))
    finally:
        torch.set_num_threads(num_threads)


def _measure(outer: OuterConfig) -> HostSpeed:
    num_elements = outer.part_elements or MAX_ELEMENTS
    codec = build_codec_choice(outer).codec
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(0)) * 1e-3
    payload = codec.encode(values).clone()
    total = WeightedSum(num_elements)
    optimizer = OuterOptimizer({0: values.clone()}, outer.optimizer)
    # Allocated before the measurement: an island reuses its memory after the first round, but new
    # memory is slow at first.
    local, gathered, difference = (torch.zeros(COPIED_ELEMENTS) for _ in range(3))

    def snapshot() -> None:
        torch.sub(local, gathered.copy_(local), out=difference)
        sum_of_squares(difference)

    def step() -> None:
        optimizer.step({0: values})
        part_digest(values, values)

    def write() -> None:
        local.copy_(gathered.copy_(difference))

    return HostSpeed(
        encode=_seconds(lambda: codec.encode(values)) / num_elements,
        decode=_seconds(lambda: codec.decode(payload, num_elements)) / num_elements,
        merge=_seconds(lambda: total.add(values, 0.5)) / num_elements,
        snapshot=_seconds(snapshot) / COPIED_ELEMENTS,
        step=_seconds(step) / num_elements,
        write=_seconds(write) / COPIED_ELEMENTS,
        digest=_seconds(lambda: part_digest(values)) / values.nbytes,
        message=MESSAGE_SECONDS,
    )


def _seconds(action: Callable[[], object]) -> float:
    """Return the thread time of one call in seconds: the best of several, so that other work on
    the machine does not count.
    """
    action()
    durations: list[float] = []
    until = time.thread_time() + MEASURE_SECONDS
    while not durations or time.thread_time() < until:
        started_at = time.thread_time()
        action()
        durations.append(time.thread_time() - started_at)
    return min(durations)
