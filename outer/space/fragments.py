"""Fragments: the sets of parameters that are averaged in turn (Streaming DiLoCo, 2501.18512), and when each is.

    inner_steps 8, fragments 4, delay 1     0   1   2   3   4   5   6   7   8   9  10
    fragment 0 is sent, merged                      s   m                       s   m
    fragment 1                                              s   m
    fragment 2                                                      s   m
    fragment 3                                                              s   m

A round sends one fragment; with one fragment that is the model, after every `inner_steps`. With `moments` it also sends
those of the fragment's params, each kind in the cycles that are for it (DES-LOC, 2505.22549).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod

from outer.config import OuterConfig
from outer.errors import InputError
from outer.space import Group, Kind, Space, TensorSpec

FINE_ELEMENTS = 4096
"""A tensor with fewer is worth its bytes: like norms and biases it never gets fewer than 8 bits an element."""


@dataclass(frozen=True)
class Schedule:
    """Between which inner steps of the run a round lies."""

    inner_steps: int
    fragments: int = 1
    delay: int = 0

    def end(self, round_number: int) -> int:
        """Inner steps of the run that are done when the round's pseudo-gradient is taken."""
        cycle, fragment = divmod(round_number, self.fragments)
        return cycle * self.inner_steps + (fragment + 1) * self.inner_steps // self.fragments

    def begin(self, round_number: int) -> int:
        """Inner steps of the run that are done when the round's own begin."""
        return self.end(round_number - 1) if round_number else 0

    def last_end(self, fragment: int, period: int, round_number: int) -> int:
        """`end` of the last round before this one that sent what the fragment sends in every `period`-th; 0: none."""
        done = (round_number - fragment + self.fragments - 1) // self.fragments
        cycles = done // period * period
        return self.end((cycles - 1) * self.fragments + fragment) if cycles else 0

    def steps(self, round_number: int) -> int:
        """Inner steps between the round before and this one; at least one."""
        return self.end(round_number) - self.begin(round_number)


def schedule_of(config: OuterConfig) -> Schedule:
    """The config's; its values have been checked."""
    return Schedule(config.inner_steps, config.fragments, config.delay)


@dataclass(frozen=True)
class MomentSpec:
    """A moment of one parameter, of the same shape."""

    name: str
    shape: tuple[int, ...]


def with_moments(specs: Sequence[TensorSpec], config: OuterConfig) -> list[TensorSpec]:
    """The model's parameters and, if they are averaged, the moments of each."""
    made: list[TensorSpec] = list(specs)
    for kind, _ in moments_of(config):
        made += [MomentSpec(moment_name(spec.name, kind), tuple(spec.shape)) for spec in specs]
    return made


def moment_name(param: str, kind: Kind) -> str:
    """What a parameter's moment is called in the canonical space, and in the slices of an island's ranks."""
    return f"{param}@{kind}"


def param_name(moment: str) -> str:
    """The parameter that a moment, by its name, is of."""
    return moment.rpartition("@")[0]


def moments_of(config: OuterConfig) -> list[tuple[Kind, int]]:
    """The moments that are averaged, and the period of each: in every `period`-th cycle."""
    return [] if config.moments is None else [("exp_avg", config.moments[0]), ("exp_avg_sq", config.moments[1])]


def groups_of(specs: Sequence[TensorSpec], config: OuterConfig, *, splits_fine: bool) -> list[Group]:
    """Every name in one group, in fragment order; a fragment's fine tensors in a group of their own if wanted.

    `specs` are the model's; names of moments are added, each kind in a group of its own.

    Raises InputError when the model has fewer layers than it takes to give every fragment something.
    """
    groups: list[Group] = []
    for fragment, names in enumerate(fragments_of(specs, config)):
        shapes = {spec.name: spec.shape for spec in specs if spec.name in names}
        fine = {name for name, shape in shapes.items() if splits_fine and is_fine(shape)}
        kinds = (tuple(n for n in shapes if n not in fine), False), (tuple(n for n in shapes if n in fine), True)
        groups += [Group(kind, fragment, is_fine=fine) for kind, fine in kinds if kind]
        groups += [
            Group(tuple(moment_name(name, kind) for name in shapes), fragment, kind=kind, period=period)
            for kind, period in moments_of(config)
        ]
    return groups


def is_fine(shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a norm's, a bias, or tiny."""
    return len(shape) < 2 or prod(shape) < FINE_ELEMENTS


def fragments_of(specs: Sequence[TensorSpec], config: OuterConfig) -> list[set[str]]:
    """The names of each fragment."""
    if config.fragments == 1:
        return [{spec.name for spec in specs}]
    units = [Unit(layer, {s.name: prod(s.shape) for s in run}) for layer, run in groupby(specs, key=_layer_of)]
    patterns: dict[str, Callable[[list[Unit], int], list[set[str]]]] = {
        "strided": strided,
        "sequential": sequential,
        "balanced": balanced,
    }
    made = patterns[config.fragment_pattern](units, config.fragments)
    if not all(made):
        layers, most = sum(unit.layer is not None for unit in units), sum(map(bool, made))
        raise InputError(
            f"outer.fragments: got {config.fragments}, but a model of {layers} layers has parameters for {most} in "
            f"the pattern {config.fragment_pattern!r}; set outer.fragments={most} or lower"
        )
    return made


@dataclass(frozen=True)
class Unit:
    """A layer, or neighbouring tensors outside of the layers (embedding, head): never cut."""

    layer: int | None
    sizes: dict[str, int]

    @property
    def names(self) -> set[str]:
        return set(self.sizes)


def strided(units: list[Unit], count: int) -> list[set[str]]:
    """Layers i, i + n, i + 2n, ... to each of n = count - 1 fragments; all else is the last."""
    inside, outside = _layers_and_rest(units)
    return [_union(inside[i :: count - 1]) for i in range(count - 1)] + [_union(outside)]


def sequential(units: list[Unit], count: int) -> list[set[str]]:
    """Neighbouring layers to each of count - 1 fragments, as evenly as they divide; all else is the last."""
    inside, outside = _layers_and_rest(units)
    bounds = [i * len(inside) // (count - 1) for i in range(count)]
    return [_union(inside[a:b]) for a, b in pairwise(bounds)] + [_union(outside)]


def balanced(units: list[Unit], count: int) -> list[set[str]]:
    """The largest unit first, each to the fragment that is smallest by then: at most 4/3 of the best."""
    fragments: list[set[str]] = [set() for _ in range(count)]
    loads = [0] * count
    for unit in sorted(units, key=lambda unit: -sum(unit.sizes.values())):
        smallest = min(range(count), key=lambda i: loads[i])
        fragments[smallest] |= unit.names
        loads[smallest] += sum(unit.sizes.values())
    return fragments


def _layers_and_rest(units: list[Unit]) -> tuple[list[Unit], list[Unit]]:
    return [u for u in units if u.layer is not None], [u for u in units if u.layer is None]


def _union(units: Sequence[Unit]) -> set[str]:
    return set().union(*(unit.names for unit in units))


def _layer_of(spec: TensorSpec) -> int | None:
    """The first number in a dotted name: layers.3.wq is of layer 3; None when there is none."""
    return next((int(word) for word in spec.name.split(".") if word.isdigit()), None)


def steps_behind(space: Space, schedule: Schedule, rounds_done: int, landed: int | None) -> dict[str, int]:
    """By parameter, the inner steps of the run behind its second moments: of those a round has sent, None: of all."""
    steps = {}
    for number, group in enumerate(space.groups):
        if group.kind == "exp_avg_sq" and (landed is None or space.sends(landed, number)):
            last = schedule.last_end(group.fragment, group.period, rounds_done)
            steps |= dict.fromkeys(map(param_name, group.names), last)
    return steps
