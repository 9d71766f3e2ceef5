"""Find the parameters of the user's model that islands average: those that are trained."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

from diloco.errors import ConfigError
from diloco.own_loop.model.masters import HALF, Masters
from diloco.own_loop.model.names import clean_name, merge_orders
from diloco.own_loop.model.ranks import WHOLE_MODEL, on_every_rank
from inner.param_spec import ParamSpec
from inner.params import LocalParams, local_tensor
from outer.space.ranks import RankGroup

MAX_NAMES_CHARS = 32_000
"""Most characters of the names in a config: half of what a config may have."""
YAML_CHARS = 5
"""Characters of an entry of a list in YAML besides its text."""
Model = nn.Module | Sequence[nn.Module]
"""The user's model, or the parts of it that a rank holds, such as the stages of an interleaved
pipeline.
"""


class RankParams(NamedTuple):
    """Parameters of the parts that one rank holds, by name, in their order. A tied one has several
    copies.
    """

    trained: dict[str, list[Tensor]]
    """The tensors that islands average: fp32 parameters and masters."""
    frozen: set[str]
    kept: list[tuple[Tensor, Tensor]]
    """The masters that Islands keeps, each with the model's parameter."""


def trained_params(model: Model, ranks: RankGroup | None = None) -> LocalParams:
    """Return a view of the parameters that require gradients, with the names and shapes of all
    ranks.

    Every rank must call it; without `ranks` this process is alone. Wrappers of DDP, torch.compile,
    recomputation and Fabric are removed from the names. Raises ConfigError on every rank if islands
    cannot average the parameters.
    """
    return hold_params(ranks or RankGroup(), model)[0]


def hold_params(
    ranks: RankGroup,
    model: Model,
    masters: Masters | None = None,
    *,
    keeps_masters: bool = False,
    as_before: bool = False,
) -> tuple[LocalParams, RankParams]:
    """Return the view of `trained_params`, and this rank's parameters. Every rank must call it.

    `as_before`: with the names and the order of earlier versions, which kept the words of wrappers.
    """
    found = on_every_rank(
        ranks, lambda: find_params(model, masters, keeps_masters=keeps_masters, as_before=as_before)
    )
    return LocalParams.of_tensors(
        gather_shapes(ranks, found, as_before=as_before), found.trained
    ), found


def parts_of(model: Model) -> list[nn.Module]:
    """Return the innermost modules of a model's parts. Raises ConfigError like `unwrap`."""
    return [unwrap(part) for part in ([model] if isinstance(model, nn.Module) else model)]


def find_params(
    model: Model,
    masters: Masters | None = None,
    *,
    keeps_masters: bool = False,
    as_before: bool = False,
) -> RankParams:
    """Return this rank's parameters. Raises ConfigError if islands cannot average them.

    `masters` are the loop's; with `keeps_masters` parameters of a half-precision dtype get new
    ones.
    """
    found = RankParams({}, set(), [])
    seen: set[int] = set()
    by_name = (
        {}
        if masters is None
        else {clean_name(name): master for name, master in masters.by_name.items()}
    )
    for part in parts_of(model):
        for full_name, param in part.named_parameters():
            name = full_name if as_before else clean_name(full_name)
            if id(param) in seen:
                continue  # Two parts share it.
            seen.add(id(param))
            if param.requires_grad:
                is_half = param.dtype in HALF and (keeps_masters or clean_name(name) in by_name)
                check_param(name, param, is_half=is_half)
                add_copy(name, param, found.trained.setdefault(name, []))
            else:
                found.frozen.add(name)
    if masters is not None:
        Masters(by_name, masters.copy).check(
            {clean_name(name): copies for name, copies in found.trained.items()}
        )
    for name, copies in found.trained.items():
        if clean_name(name) in by_name:
            found.trained[name] = [by_name[clean_name(name)]]
        elif copies[0].dtype in HALF:
            found.trained[name] = [copy.detach().float() for copy in copies]
            found.kept.extend(zip(found.trained[name], copies, strict=True))
    return found


def add_copy(name: str, param: Tensor, copies: list[Tensor]) -> None:
    """Add a parameter of another part. Raises ConfigError if it is not equal to the copies
    before.
    """
    for other in copies[:1]:
        if not torch.equal(local_tensor(other), local_tensor(param)):
            raise ConfigError(
                f"two parts of the model hold {name!r} with different shapes or values. "
                f"{WHOLE_MODEL}"
            )
    copies.append(param)


def gather_shapes(
    ranks: RankGroup, found: RankParams, *, as_before: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the island's parameters by name, in one order. Every rank must call it.

    Raises ConfigError on every rank if two ranks have one name for parameters of different shapes,
    or train and freeze it.
    """
    mine = {name: tuple(copies[0].shape) for name, copies in found.trained.items()}
    by_rank: list[tuple[Mapping[str, tuple[int, ...]], set[str]]] = ranks.gather(
        (mine, found.frozen)
    )
    first: dict[str, tuple[int, tuple[int, ...]]] = {}
    for rank, (shapes, _) in enumerate(by_rank):
        for name, shape in shapes.items():
            other, expected = first.setdefault(name, (rank, shape))
            if shape != expected:
                raise ConfigError(
                    f"ranks {other} and {rank} of this island hold {name!r} with different shapes: "
                    f"{expected} and {shape}. {WHOLE_MODEL}"
                )
    for rank, (_, frozen) in enumerate(by_rank):
        if both := sorted(frozen & first.keys()):
            other = first[both[0]][0]
            raise ConfigError(
                f"{both[0]!r} requires a gradient on rank {other} of this island and none on rank "
                f"{rank}; freeze the same parameters on every rank"
            )
    if not first:
        raise ConfigError(
            "no parameter of the model requires a gradient: there is nothing that islands could "
            "average"
        )
    orders = [list(shapes) for shapes, _ in by_rank]
    order = orders[0] if as_before else merge_orders(orders)
    return {name: first[name][1] for name in order} | {
        name: shape for name, (_, shape) in first.items()
    }


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, torch.compile and Fabric. Raises
    ConfigError for FSDP1.
    """
    while True:
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise ConfigError(
                "the model is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters "
                "have lost names and "
                "shapes; shard it with torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(forwarded := getattr(model, "_forward_module", None), nn.Module):
            model = forwarded  # Fabric's wrapper
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model


def check_param(name: str, param: Tensor, *, is_half: bool = False) -> None:
    """Raise ConfigError if islands cannot average the parameter. `is_half`: it has a master."""
    problem = ""
    cure = ""
    if param.is_meta:
        problem = "is on the meta device"
        cure = "give it values first (model.to_empty, then initialise or load)"
    elif param.dtype != torch.float32 and not is_half:
        problem = f"is {str(param.dtype).removeprefix('torch.')}"
        cure = (
            "keep trained parameters in float32 and compute in bfloat16 by torch.autocast or "
            "FSDP's mixed precision, "
            "give fp32 masters as params=diloco.Masters(...), or let Islands keep masters of "
            "bfloat16 and float16 by "
            "island.masters=true"
        )
    elif param.numel() == 0:
        problem = f"has the shape {tuple(param.shape)}"
        cure = "take it out of the model, or set requires_grad=False"
        if hasattr(param, "ds_shape") or param.ndim == 1:
            cure = (
                "DeepSpeed's ZeRO-3 takes the values away like this: shard by fully_shard (FSDP2) "
                "instead, or " + cure
            )
    elif isinstance(param, DTensor) and any(
        isinstance(place, Partial) for place in param.placements
    ):
        problem = "is a DTensor of partial sums"
        cure = "redistribute it to Shard or Replicate"
    if problem:
        raise ConfigError(
            f"the parameter {name!r} {problem}, and islands cannot average it; {cure}"
        )


def describe(specs: Sequence[ParamSpec]) -> str:
    """Return one line that differs between models whose trained parameters differ in names, shapes
    or order, or in whose moments are averaged.
    """
    text = json.dumps([(spec.name, spec.shape) for spec in specs])
    elements = sum(spec.matrix_shape[0] * spec.matrix_shape[1] for spec in specs)
    line = (
        f"{len(specs)} parameters with {elements:,} elements, sha256 of names and shapes "
        f"{short_hash(text)}"
    )
    with_moments = [spec.name for spec in specs if spec.has_moments]
    if len(with_moments) < len(specs):
        line += (
            f"; {len(with_moments)} with moments, sha256 of names "
            f"{short_hash(json.dumps(with_moments))}"
        )
    return line


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def list_names(specs: Sequence[ParamSpec]) -> tuple[str, ...]:
    """Return RunConfig.param_names: as many parameters as have room in the config's text."""
    entries: list[str] = []
    before = ""
    room = MAX_NAMES_CHARS
    for spec in specs:
        text = f"{spec.name} {list(spec.shape)}"
        shared = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False))
        )
        entry = f"{shared}:{text[shared:]}"
        room -= len(entry) + YAML_CHARS
        if room < 0:
            break
        entries.append(entry)
        before = text
    return tuple(entries)
