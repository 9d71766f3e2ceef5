"""The buffers of the user's model that islands share."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch.distributed.tensor import DTensor

from diloco.errors import ConfigError
from diloco.own_loop.model.names import clean_name, merge_orders
from diloco.own_loop.model.params import Model, parts_of
from diloco.own_loop.model.ranks import WHOLE_MODEL, on_every_rank
from diloco.runtime.buffer_watch import BufferWatch
from inner.model.buffers import Buffer, BufferKind, ParamsView, all_buffers, with_buffers
from inner.param_spec import ParamSpec
from outer.space.fragments import plain_name
from outer.space.ranks import RankGroup

KINDS: Mapping[str, BufferKind] = {"mean": "buffer", "donor": "donor_buffer"}
NAMED = 4
"""Most buffers that a message names."""
MOST_EXACT = 1 << 24
"""Integers up to this one are exact in fp32, in which values travel."""
CURE = 'give Islands their names, as in buffers={"*.running_mean": "mean"} (docs/library.md)'


class OwnBuffers:
    """The named buffers of a model, and a watch over its other ones."""

    def __init__(self, ranks: RankGroup, model: Model, named: Mapping[str, str] | None) -> None:
        """Find the buffers that `named` names, by full names or patterns such as `*.running_mean`,
        with "mean" or "donor" for each. Every rank must call it. Raises ConfigError on every rank.
        """
        found = [
            replace(buffer, name=clean_name(buffer.name))
            for part in parts_of(model)
            for buffer in all_buffers(part)
        ]
        _require_found(ranks, found, named or {})
        chosen = on_every_rank(ranks, lambda: [_choose(buffer, named or {}) for buffer in found])
        self._held = [buffer for buffer in chosen if buffer is not None]
        self._specs = _gather_specs(ranks, [buffer.spec for buffer in self._held])
        specs = [(spec.name, spec.shape) for spec in self._specs]
        digest = hashlib.sha256(json.dumps(specs).encode()).hexdigest()[:16]
        self.text = f"; {len(specs)} buffers, sha256 of names and shapes {digest}" if specs else ""
        """Differs between models whose named buffers differ; empty without any."""
        others = [buffer for buffer, choice in zip(found, chosen, strict=True) if choice is None]
        self.watch = BufferWatch(others, CURE)
        """Tells of other buffers that change."""

    def beside(self, params: ParamsView) -> ParamsView:
        """Return a view of the parameters and of the named buffers."""
        return with_buffers(params, self._specs, self._held)


def _gather_specs(ranks: RankGroup, mine: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Return the specs of the named buffers of all ranks, in one order. Every rank must call it.

    Raises ConfigError on every rank if two ranks have one name for buffers of different shapes.
    """
    by_rank: list[dict[str, tuple[int, ...]]] = ranks.gather(
        {spec.name: spec.shape for spec in mine}
    )
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, theirs in enumerate(by_rank):
        for name, shape in theirs.items():
            if shapes.setdefault(name, shape) != shape:
                raise ConfigError(
                    f"buffers: rank {rank} of this island holds {plain_name(name)!r} with the "
                    f"shape {shape}, and another rank with {shapes[name]}. {WHOLE_MODEL}"
                )
    order = merge_orders([list(theirs) for theirs in by_rank])
    return [ParamSpec(name, shapes[name]) for name in order]


def _choose(buffer: Buffer, named: Mapping[str, str]) -> Buffer | None:
    """Return the buffer with its kind, or None if it is not named. Raises ConfigError."""
    found = {how for name, how in named.items() if fnmatchcase(buffer.name, name)}
    if not found:
        return None
    if len(found) > 1:
        raise ConfigError(
            f"buffers: {buffer.name!r} is named both as mean and as donor; name it once"
        )
    (how,) = found
    if how not in KINDS:
        raise ConfigError(f"buffers: got {how!r} for {buffer.name!r}; allowed: mean, donor")
    if problem := _find_problem(buffer, how):
        raise ConfigError(f"buffers: {buffer.name!r} {problem}")
    return replace(buffer, kind=KINDS[how])


def _find_problem(buffer: Buffer, how: str) -> str:
    """Return why islands cannot share the buffer, with the cure, or ""."""
    tensor = buffer.module.get_buffer(buffer.attribute)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta:
        return "is on the meta device; give it values first (model.to_empty, then fill it)"
    if tensor.numel() == 0:
        return f"has the shape {tuple(tensor.shape)}; leave it out"
    if isinstance(tensor, DTensor) and not all(
        placement.is_replicate() for placement in tensor.placements
    ):
        return (
            f"is a DTensor with the placements {tensor.placements}; each rank must hold it "
            "whole (Replicate)"
        )
    if tensor.is_complex():
        return (
            f"is {dtype}, and values travel in float32; keep real and imaginary parts in two "
            "buffers"
        )
    if not tensor.is_floating_point() and how == "mean":
        return f"is {dtype}, of which there is no mean; name it as donor, or leave it out"
    if not tensor.is_floating_point() and int(tensor.long().abs().max()) > MOST_EXACT:
        return (
            f"is {dtype} and holds values above {MOST_EXACT}, and values travel in float32; "
            "leave it out"
        )
    return ""


def _require_found(ranks: RankGroup, buffers: Sequence[Buffer], named: Mapping[str, str]) -> None:
    """Raise ConfigError on every rank for a name that no buffer has, or that not all ranks give.
    Every rank must call it.
    """
    for rank, theirs in enumerate(ranks.gather(sorted(named.items()))):
        if theirs != sorted(named.items()):
            raise ConfigError(
                f"buffers: rank {rank} of this island names {theirs}, and another rank "
                f"{dict(named)}"
            )
    names = [
        name for theirs in ranks.gather([buffer.name for buffer in buffers]) for name in theirs
    ]
    for pattern in named:
        if not any(fnmatchcase(name, pattern) for name in names):
            there = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "") or "none"
            raise ConfigError(f"buffers: the model has no buffer {pattern!r}; its buffers: {there}")
