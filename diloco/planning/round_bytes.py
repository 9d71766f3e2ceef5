"""What an island sends in a round, counted from the parts themselves, before anything is launched."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from diloco.planning.specs import Spec
from outer.codecs import build_codec
from outer.codecs.base import Codec
from outer.coding import Coding, coding_of
from outer.config import OuterConfig
from outer.fragments import groups_of, with_moments
from outer.space import Part, Space


@dataclass(frozen=True)
class Fragment:
    """What one round sends. Bytes are of payloads."""

    num_elements: int
    num_parts: int
    sent_bytes: float
    """By an island, on average."""
    most_bytes: int
    """By the island that sends most."""
    last_bytes: int
    """That a reducer still sends when all else has arrived: the mean of its last part, to every other island."""
    mean_bytes: int
    """Of all means, as they are digested."""


def fragments_of(outer: OuterConfig, specs: tuple[Spec, ...], num_islands: int) -> Sequence[Fragment]:
    """What each round sends, of one cycle, or with moments of as many as it takes for all of them to come around.

    Raises InputError when the model cannot be cut into so many fragments.
    """
    # When it is sent does not matter to what is sent.
    what = outer.model_copy(update={"inner_steps": outer.fragments, "delay": 0, "eager": False, "rounds": 1})
    return _fragments(what.model_dump_json(), specs, num_islands)


@lru_cache(maxsize=64)
def _fragments(outer_json: str, specs: tuple[Spec, ...], num_islands: int) -> Sequence[Fragment]:
    outer = OuterConfig.model_validate_json(outer_json)
    coding = coding_of(outer)
    groups = groups_of(specs, outer, splits_fine=coding.splits_fine)
    space = Space(with_moments(specs, outer), outer.part_elements, coding.block_elements, groups)
    if outer.gossip is not None:
        params, peers = build_codec(outer.gossip.params), min(outer.gossip.group, num_islands) - 1
        return [_gossiped(space.parts, coding, params, peers)]
    rounds = lcm(*(outer.moments or (1,))) * outer.fragments
    sent = ([i for group in space.sent_in(number) for i in space.parts_of[group]] for number in range(rounds))
    return [_fragment([space.parts[i] for i in indices], coding, num_islands) for indices in sent]


def _gossiped(parts: Sequence[Part], coding: Coding, params: Codec, peers: int) -> Fragment:
    """Each of these peers gets every part's pseudo-gradient and params."""
    payloads = sum(coding.of(p).num_bytes(p.num_elements) + params.num_bytes(p.num_elements) for p in parts)
    return Fragment(sum(p.num_elements for p in parts), len(parts), peers * payloads, peers * payloads, 0, payloads)


def _fragment(parts: Sequence[Part], coding: Coding, num_islands: int) -> Fragment:
    """Every other island's reducer gets a part's payload, and sends its mean; of sparse codecs all get all payloads."""
    peers = num_islands - 1
    by_all = last_bytes = mean_bytes = 0
    as_reducer = [0] * num_islands
    for part in parts:
        payload = coding.of(part).num_bytes(part.num_elements)
        mean = coding.of_mean(part).num_bytes(part.num_elements)
        mean_bytes += mean
        if coding.gathers(part):
            by_all += peers * payload
        else:
            by_all += payload
            as_reducer[part.index % num_islands] += peers * mean - payload
            last_bytes = peers * mean
    sent = [by_all + own for own in as_reducer]
    num_elements = sum(part.num_elements for part in parts)
    return Fragment(num_elements, len(parts), sum(sent) / num_islands, max(sent), last_bytes, mean_bytes)
