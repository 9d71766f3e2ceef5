"""Fragments: the sets of parameters that are averaged in turn (Streaming DiLoCo, 2501.18512), and
their schedule.

    inner_steps 8, fragments 4, delay 1     0   1   2   3   4   5   6   7   8   9  10
    fragment 0 is sent, merged                      s   m                       s   m
    fragment 1                                              s   m
    fragment 2                                                      s   m
    fragment 3                                                              s   m

A round sends one fragment; a single fragment is the whole model, sent after every `inner_steps`.
With `moments` a round also sends the moments of the fragment's parameters, each kind in every
`period`-th cycle (DES-LOC, 2505.22549).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from math import prod

from outer.config import OuterConfig
from outer.errors import InputError
from outer.space.experts import (
    ExpertGroup,
    RoutedClaims,
    check_number,
    expert_of,
    group_experts,
    have_own_groups,
)
from outer.space.layout import PartGroup, Space, TensorKind, TensorSpec

FINE_ELEMENTS = 4096
"""Tensors with fewer elements are fine, like norms and biases: they always keep at least 8 bits per
element.
"""


@dataclass(frozen=True)
class FragmentSchedule:
    """Maps rounds to inner steps of the run."""

    inner_steps: int
    fragments: int = 1
    delay: int = 0

    def end(self, round_number: int) -> int:
        """Return the number of inner steps done in the run when the round's pseudo-gradient is
        computed.
        """
        cycle, fragment = divmod(round_number, self.fragments)
        return cycle * self.inner_steps + (fragment + 1) * self.inner_steps // self.fragments

    def begin(self, round_number: int) -> int:
        """Return the number of inner steps done in the run when the round starts."""
        return self.end(round_number - 1) if round_number else 0

    def last_end(self, fragment: int, period: int, round_number: int) -> int:
        """Return `end` of the last round before this one that sent the part groups of this
        fragment and period; 0 if there is none.
        """
        cycles = (round_number - fragment + self.fragments - 1) // self.fragments // period * period
        return self.end((cycles - 1) * self.fragments + fragment) if cycles else 0

    def steps(self, round_number: int) -> int:
        """Return the number of inner steps from the previous round to this one, at least one."""
        return self.end(round_number) - self.begin(round_number)


def build_schedule(config: OuterConfig) -> FragmentSchedule:
    """Return the schedule of a validated config."""
    return FragmentSchedule(config.inner_steps, config.fragments, config.delay)


@dataclass(frozen=True)
class NamedShape:
    """A moment of one parameter, which has the parameter's shape, or a buffer of the model."""

    name: str
    shape: tuple[int, ...]


def add_moments(specs: Sequence[TensorSpec], config: OuterConfig) -> list[TensorSpec]:
    """Return the model's parameters and buffers, followed by the moments of the parameters if the
    run averages moments.
    """
    all_specs: list[TensorSpec] = list(specs)
    params = specs_of(specs, "params")
    for kind, _ in list_moments(config):
        all_specs += [
            NamedShape(name_of_kind(s.name, kind), tuple(s.shape)) for s in params if has_moments(s)
        ]
    return all_specs


def has_moments(spec: TensorSpec) -> bool:
    """Return whether the moments of a parameter are averaged if the run averages moments."""
    return getattr(spec, "has_moments", True)


def name_of_kind(name: str, kind: TensorKind) -> str:
    """Return the name, in the canonical space and in the slices of an island's ranks, of a
    parameter's moment, or of a buffer of the model.
    """
    return f"{name}@{kind}"


def plain_name(name: str) -> str:
    """Return the name in the model: of the parameter to which a moment belongs, or of a buffer."""
    return name.partition("@")[0]


def specs_of(specs: Sequence[TensorSpec], kind: TensorKind) -> list[TensorSpec]:
    """Return the specs of this kind.

    >>> specs = [NamedShape("w", (2,)), NamedShape("mean@buffer", (2,))]
    >>> [spec.name for spec in specs_of(specs, "buffer")]
    ['mean@buffer']
    """
    return [spec for spec in specs if (spec.name.partition("@")[2] or "params") == kind]


def list_moments(config: OuterConfig) -> list[tuple[TensorKind, int]]:
    """Return the kinds of moments that are averaged, each with its period in cycles."""
    return (
        []
        if config.moments is None
        else [("exp_avg", config.moments[0]), ("exp_avg_sq", config.moments[1])]
    )


def build_part_groups(
    specs: Sequence[TensorSpec], config: OuterConfig, *, splits_fine: bool
) -> list[PartGroup]:
    """Assign every name to one part group, in fragment order.

    `specs` are the model's parameters and buffers. The names of averaged moments are added, in one
    part group per kind. With `splits_fine` the fine tensors of a fragment form a part group of
    their own. The averaged buffers of a layer are sent with the layer's parameters. Raises
    InputError when the model has too few layers to give every fragment parameters.
    """
    groups: list[PartGroup] = []
    params = specs_of(specs, "params")
    fragments = assign_fragments(params, config)
    buffers = assign_buffers(specs_of(specs, "buffer"), fragments)
    for fragment, names in enumerate(fragments):
        of_fragment = [spec for spec in params if spec.name in names]
        experts = build_expert_groups(of_fragment, config, fragment, splits_fine=splits_fine)
        apart = {name for group in experts for name in group.names}
        shapes = {spec.name: spec.shape for spec in of_fragment if spec.name not in apart}
        fine = tuple(name for name, shape in shapes.items() if splits_fine and is_fine(shape))
        coarse = tuple(name for name in shapes if name not in fine)
        groups += [PartGroup(coarse, fragment)] if coarse else []
        groups += [PartGroup(fine, fragment, is_fine=True)] if fine else []
        groups += experts
        averaged = [spec.name for spec in params if spec.name in names and has_moments(spec)]
        groups += [
            PartGroup(
                tuple(name_of_kind(name, kind) for name in averaged),
                fragment,
                kind=kind,
                period=period,
            )
            for kind, period in list_moments(config)
            if averaged
        ]
        groups += (
            [PartGroup(buffers[fragment], fragment, kind="buffer")] if buffers[fragment] else []
        )
    donors = tuple(spec.name for spec in specs_of(specs, "donor_buffer"))
    return [*groups, PartGroup(donors, kind="donor_buffer")] if donors else groups


def build_expert_groups(
    specs: Sequence[TensorSpec], config: OuterConfig, fragment: int, *, splits_fine: bool
) -> list[PartGroup]:
    """Return the part groups of a fragment's experts: one, or one per group of experts if each has
    a weight of its own. Empty if nothing treats experts otherwise than the rest.
    """
    experts = [spec for spec in specs if expert_of(spec) is not None]
    if not experts or not have_own_groups(config):
        return []
    fine = splits_fine and all(is_fine(tuple(spec.shape)) for spec in experts)
    build = partial(
        PartGroup, fragment=fragment, is_fine=fine, period=config.experts.every, is_experts=True
    )
    if config.merge.experts != "routed":
        return [build(tuple(spec.name for spec in experts))]
    groups = group_experts(experts, config.experts.group).values()
    return [build(names, count=place) for place, names in enumerate(groups)]


def build_claims(
    specs: Sequence[TensorSpec], config: OuterConfig, per_token: int
) -> RoutedClaims | None:
    """Return what islands claim about their experts; None if experts are treated like the rest.

    `per_token`: number of experts that each token chooses in a layer; 0 if it is not known. Raises
    InputError if the model has no experts, or too many groups of them, or if they are not counted.
    """
    params = specs_of(specs, "params")
    if not have_own_groups(config):
        return None
    setting = "outer.merge.experts: routed" if config.merge.experts == "routed" else "outer.experts"
    if not any(expert_of(spec) for spec in params):
        raise InputError(
            f"{setting} is for mixtures of experts, and the model has no experts; leave it out"
        )
    groups: dict[int, Sequence[ExpertGroup]] = {}
    if config.merge.experts == "routed":
        if per_token == 0:
            raise InputError(
                f"{setting} needs the counts of our own routers, and here nothing counts; use "
                "tokens"
            )
        for fragment, names in enumerate(assign_fragments(params, config)):
            groups[fragment] = list(
                group_experts([s for s in params if s.name in names], config.experts.group)
            )
            check_number(len(groups[fragment]), config)
    return RoutedClaims(groups, per_token, config.experts.every, config.fragments)


def is_fine(shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of this shape is a norm, a bias, or tiny."""
    return len(shape) < 2 or prod(shape) < FINE_ELEMENTS


def assign_fragments(specs: Sequence[TensorSpec], config: OuterConfig) -> list[set[str]]:
    """Return the parameter names of each fragment. Raises InputError when a fragment would get
    none.
    """
    if config.fragments == 1:
        return [{spec.name for spec in specs}]
    runs = groupby(specs, key=lambda spec: _layer_of(spec.name))
    units = [FragmentUnit(layer, {s.name: prod(s.shape) for s in run}) for layer, run in runs]
    patterns: dict[str, Callable[[list[FragmentUnit], int], list[set[str]]]] = {
        "strided": make_strided,
        "sequential": make_sequential,
        "balanced": make_balanced,
    }
    fragments = patterns[config.fragment_pattern](units, config.fragments)
    if not all(fragments):
        layers = sum(unit.layer is not None for unit in units)
        most = sum(map(bool, fragments))
        raise InputError(
            f"outer.fragments: got {config.fragments}, but a model of {layers} layers has "
            f"parameters for {most} in "
            f"the pattern {config.fragment_pattern!r}; set outer.fragments={most} or lower"
        )
    return fragments


def assign_buffers(
    buffers: Sequence[TensorSpec], fragments: Sequence[Collection[str]]
) -> list[tuple[str, ...]]:
    """Return the names of each fragment's averaged buffers. A buffer outside the layers, or of a
    layer without parameters, is in the last fragment.
    """
    fragment_of = {
        _layer_of(name): number for number, names in enumerate(fragments) for name in names
    }
    last = len(fragments) - 1
    number_of = {
        buffer.name: last
        if (layer := _layer_of(buffer.name)) is None
        else fragment_of.get(layer, last)
        for buffer in buffers
    }
    return [
        tuple(name for name, number in number_of.items() if number == each)
        for each in range(len(fragments))
    ]


@dataclass(frozen=True)
class FragmentUnit:
    """A layer, or adjacent tensors outside the layers (embedding, head); always within one
    fragment.
    """

    layer: int | None
    sizes: dict[str, int]
    """Number of elements of each tensor, by name."""


def make_strided(units: list[FragmentUnit], count: int) -> list[set[str]]:
    """Return layers i, i + n, i + 2n, ... for each of n = count - 1 fragments; everything else
    is the last fragment.
    """
    inside, outside = _layers_and_rest(units)
    return [_union(inside[i :: count - 1]) for i in range(count - 1)] + [_union(outside)]


def make_sequential(units: list[FragmentUnit], count: int) -> list[set[str]]:
    """Return adjacent layers for each of count - 1 fragments, divided evenly; everything else is
    the last fragment.
    """
    inside, outside = _layers_and_rest(units)
    bounds = [i * len(inside) // (count - 1) for i in range(count)]
    return [_union(inside[a:b]) for a, b in pairwise(bounds)] + [_union(outside)]


def make_balanced(units: list[FragmentUnit], count: int) -> list[set[str]]:
    """Assign units, largest first, to the fragment that is smallest so far. The largest fragment
    has at most 4/3 of the optimal size.
    """
    fragments: list[set[str]] = [set() for _ in range(count)]
    loads = [0] * count
    for unit in sorted(units, key=lambda unit: -sum(unit.sizes.values())):
        smallest = min(range(count), key=lambda i: loads[i])
        fragments[smallest] |= set(unit.sizes)
        loads[smallest] += sum(unit.sizes.values())
    return fragments


def _layers_and_rest(units: list[FragmentUnit]) -> tuple[list[FragmentUnit], list[FragmentUnit]]:
    return [u for u in units if u.layer is not None], [u for u in units if u.layer is None]


def _union(units: Sequence[FragmentUnit]) -> set[str]:
    return {name for unit in units for name in unit.sizes}


def _layer_of(name: str) -> int | None:
    """Return the first number in a dotted name (3 for layers.3.wq), or None without a number."""
    return next((int(word) for word in name.split(".") if word.isdigit()), None)


def count_moment_steps(
    space: Space, schedule: FragmentSchedule, rounds_done: int, landed: int | None
) -> dict[str, int]:
    """Return the inner steps of the run that each parameter's averaged second moments include, by
    parameter name.

    Covers the second moments that round `landed` sent, or all second moments if it is None.
    """
    steps = {}
    for number, group in enumerate(space.part_groups):
        if group.kind == "exp_avg_sq" and (landed is None or space.sends(landed, number)):
            last = schedule.last_end(group.fragment, group.period, rounds_done)
            steps |= dict.fromkeys(map(plain_name, group.names), last)
    return steps
