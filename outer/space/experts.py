"""Groups of experts: tensors that only some tokens reach.

A spec of such a tensor has `expert`, its layer and its number in the layer. Some settings
(`outer.experts`, `outer.merge.experts`) treat experts otherwise than the rest of a model. Then they
have part groups of their own. With the merge `routed` neighbouring experts of a layer form a group,
and each island weighs in the group's mean by the number of tokens that it has sent to the group:

    experts.group 2       layer 3: experts 0 1 | 2 3 | 4 5      three groups, so three counts
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from outer.config import OuterConfig
from outer.errors import InputError, MessageError

MAX_COUNTS = 4096
"""Most groups of experts of a fragment. The counts of all participants are in a round's plan."""
MAX_COUNTS_OF_ALL = 48 << 10
"""Most counts of the islands that begin a run together, so that a plan can be sent."""


@dataclass(frozen=True)
class ExpertGroup:
    """Neighbouring experts of one layer."""

    layer: int
    first: int
    """Number of the first expert in the layer."""
    num_experts: int

    def count(self, counts: Sequence[int]) -> int:
        """Return the group's share of the layer's counts by expert."""
        return sum(counts[self.first : self.first + self.num_experts])


def expert_of(spec: object) -> tuple[int, int] | None:
    """Return layer and number of the expert to which a tensor belongs; None if to none."""
    return getattr(spec, "expert", None)


def have_own_groups(config: OuterConfig) -> bool:
    """Return whether experts have part groups of their own, because a setting treats them
    otherwise.
    """
    return config.experts.is_set or config.merge.experts == "routed"


def group_experts(specs: Sequence, size: int) -> dict[ExpertGroup, tuple[str, ...]]:
    """Return the names of each group of up to `size` experts, by layer, then number.

    >>> from inner.param_spec import ParamSpec
    >>> names = [f"layers.1.ffn.experts.{number}.up_proj.weight" for number in range(3)]
    >>> specs = [ParamSpec(name, (8, 8)) for name in names]
    >>> [len(group) for group in group_experts(specs, 2).values()]
    [2, 1]
    """
    places = sorted((place, spec.name) for spec in specs if (place := expert_of(spec)) is not None)
    groups: dict[ExpertGroup, tuple[str, ...]] = {}
    for (layer, part), run in groupby(places, key=lambda each: (each[0][0], each[0][1] // size)):
        members = list(run)
        last = members[-1][0][1]
        group = ExpertGroup(layer, part * size, last - part * size + 1)
        groups[group] = tuple(name for _, name in members)
    return groups


def check_number(num_groups: int, config: OuterConfig) -> None:
    """Raise InputError if a fragment has more groups of experts than a ready or a plan can
    count.
    """
    most = min(MAX_COUNTS, MAX_COUNTS_OF_ALL // config.start_islands)
    if num_groups > most:
        size = config.experts.group
        raise InputError(
            f"outer.experts.group: got {size}, with which a fragment has {num_groups} groups of "
            f"experts, and the ready messages of {config.start_islands} islands can count {most} "
            f"groups each; set outer.experts.group to {-(-num_groups * size // most)} or more, or "
            "raise outer.fragments"
        )


def apportion(counts: Sequence[int], total: int) -> list[int]:
    """Return integers in the proportion of `counts` that sum to `total`: largest remainders are
    rounded up first. One count at least must be above 0.

    >>> apportion([30, 10], 40), apportion([2, 1], 10)
    ([30, 10], [7, 3])
    """
    whole = sum(counts)
    shares = [count * total // whole for count in counts]
    order = sorted(range(len(counts)), key=lambda i: (-(counts[i] * total % whole), i))
    for index in order[: total - sum(shares)]:
        shares[index] += 1
    return shares


@dataclass(frozen=True)
class RoutedClaims:
    """What an island may claim about its experts in a ready message."""

    groups: Mapping[int, Sequence[ExpertGroup]]
    """The groups of each fragment in the order of their counts; empty if the merge does not weigh
    by counts.
    """
    per_token: int
    """Number of experts that each token chooses in a layer."""
    period: int
    """Experts are sent in every `period`-th round of a fragment."""
    num_fragments: int

    def fill(self, round_number: int, counts: Mapping[ExpertGroup, int], tokens: int) -> list[int]:
        """Return the counts to claim in a round for progress on `tokens` tokens, see `check`.

        A router counts all tokens, also those without a target. So each layer's counts are claimed
        in proportion, and sum up to `per_token` x `tokens`. If nothing was counted, all experts are
        claimed equally.
        """
        claimed = []
        for _, groups in self._layers(round_number):
            found = [counts[group] for group in groups]
            weights = found if any(found) else [group.num_experts for group in groups]
            claimed += apportion(weights, self.per_token * tokens)
        return claimed

    def sends(self, round_number: int) -> bool:
        """Return whether a round sends experts."""
        return (round_number // self.num_fragments + 1) % self.period == 0

    def check(self, island: str, round_number: int, tokens: int, counts: Sequence[int]) -> None:
        """Raise MessageError unless the counts of each layer sum up to `per_token` x `tokens`, and
        no group has more than its experts can get.
        """
        layers = self._layers(round_number)
        expected = sum(len(groups) for _, groups in layers)
        if len(counts) != expected:
            raise MessageError(
                f"{island!r} claims {len(counts)} counts of tokens by expert, expected {expected}"
            )
        start = 0
        for layer, groups in layers:
            _check_layer(
                island, layer, groups, counts[start : start + len(groups)], tokens, self.per_token
            )
            start += len(groups)

    def _layers(self, round_number: int) -> list[tuple[int, list[ExpertGroup]]]:
        if not self.sends(round_number):
            return []
        groups = self.groups.get(round_number % self.num_fragments, ())
        return [(layer, list(run)) for layer, run in groupby(groups, key=lambda group: group.layer)]


def _check_layer(
    island: str,
    layer: int,
    groups: Sequence[ExpertGroup],
    counts: Sequence[int],
    tokens: int,
    per_token: int,
) -> None:
    if sum(counts) != per_token * tokens:
        raise MessageError(
            f"{island!r} claims that {sum(counts)} choices of experts were made in layer {layer}, "
            f"but {per_token} x {tokens} tokens make {per_token * tokens}"
        )
    for group, count in zip(groups, counts, strict=True):
        # A token chooses an expert once at most. Claimed counts are rounded, by less than 1.
        most = min(per_token, group.num_experts) * tokens
        if count > most:
            raise MessageError(
                f"{island!r} claims {count} choices of experts {group.first} to "
                f"{group.first + group.num_experts - 1} "
                f"of layer {layer}, which {tokens} tokens can choose {most} times"
            )
