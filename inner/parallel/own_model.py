"""An own model, named by its import path: its requirements, and how it is checked, built and
initialised.

`model.name: my_package.models:GatedConv` is a subclass of torch.nn.Module. It is built as

    GatedConv(vocab_size=..., seq_len=..., **model.options)

Requirements:

- `forward(tokens_BS)` maps int64 tokens (B, S), S at most seq_len, to logits (B, S, V) with V at
  least vocab_size. Position s sees only tokens up to s. The trainer computes the loss:
  cross-entropy in fp32, summed over valid targets.
- `layers` is a ModuleList (or ModuleDict) of its blocks. FSDP gathers, recomputation repeats and
  torch.compile compiles one block at a time, and fragments consist of blocks. Decay, Muon and
  groups depend on names: `embed.weight` does not decay.
- `axes` names the axes of the mesh that it may be spread over: dp_replicate, dp_shard, or both.
- Parameters are fp32, have at least one dimension, and all of them have gradients. A method
  `fill_buffers()` fills buffers, because modules are built without memory.
- Initial weights: an optional method `normal_of(name)` returns mean and standard deviation of a
  parameter. Without it, the weights of modules named `norm` are 1, biases 0, and all others have a
  standard deviation of 0.02. Weights are drawn by rows from (seed, name), so they are the same on
  every mesh and processor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inner.config import ParallelConfig
from inner.data.micro_batch import MicroBatch
from inner.errors import InputError, summarise
from inner.import_path import call_text, load
from inner.mesh import Degrees
from inner.model.buffers import saved_buffers
from inner.model.init import STD, fill_normal
from inner.model.sizes import OwnModel
from inner.model.stage import Stage
from inner.model.transformer import Transformer
from inner.parallel.layout_check import check_whole_weights
from inner.param_spec import ParamSlice, ParamSpec
from inner.params import LocalParams

KEY = "model.name"
AXES = ("dp_replicate", "dp_shard")
"""Axes of the mesh that an own model may name."""


def build_own_model(model: OwnModel, seq_len: int) -> Transformer:
    """Build the model without memory, as a pipeline with a single stage. Raises InputError if that
    fails.
    """
    found = load(model.name, KEY)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise InputError(
            f"{KEY}: got {model.name!r}, which is not a subclass of torch.nn.Module; name one"
        )
    with (
        torch.device("meta"),
        _explained(f"is {call_text(found)}, and with {_arguments(model)} it raised"),
    ):
        built = cast(Any, found)(vocab_size=model.vocab_size, seq_len=seq_len, **model.options)
    layers = getattr(built, "layers", None)
    if not isinstance(layers, nn.ModuleList | nn.ModuleDict) or not len(layers):
        raise InputError(
            f"{KEY}: {model.name} has no blocks in `layers`, a torch.nn.ModuleList; put them there"
        )
    built.stage = Stage(0, range(len(layers)), is_first=True, is_last=True)
    # The parallel dimensions use only those members of a Transformer that the module's docstring
    # requires.
    return cast(Transformer, built)


def check_own_model(
    model: OwnModel,
    degrees: Degrees,
    parallel: ParallelConfig,
    seq_len: int,
    *,
    masks_documents: bool,
) -> None:
    """Run a forward and a backward without memory. Raises InputError if the model cannot train on
    this mesh.
    """
    built: nn.Module = build_own_model(model, seq_len)
    _check_axes(model, tuple(getattr(built, "axes", ())), degrees)
    check_whole_weights(parallel, degrees, model)
    if masks_documents:
        raise InputError(
            f"data.document_mask: {model.name} gets only tokens, and no documents; set "
            "document_mask to false"
        )
    if parallel.recompute == "attention":
        raise InputError(
            f"island.parallel.recompute: {model.name} may have no attention; set it to selective "
            "or full"
        )
    if next(built.buffers(), None) is not None and not hasattr(built, "fill_buffers"):
        raise InputError(
            f"{KEY}: {model.name} has buffers and no method fill_buffers() that gives them their "
            "values"
        )
    for buffer in saved_buffers([built]):
        if not buffer.tensor.is_floating_point():
            raise InputError(
                f"{KEY}: {model.name} names {buffer.name} in saved_buffers, which is "
                f"{buffer.tensor.dtype}; islands "
                "average these buffers, so they must be of floating point: take it out of "
                "saved_buffers"
            )
    for name, param in built.named_parameters():
        if param.dtype != torch.float32 or param.ndim == 0:
            got = f"{param.dtype} {tuple(param.shape)}"
            raise InputError(
                f"{KEY}: {model.name} has {name} as {got}; parameters must be fp32 and have at "
                "least one dimension"
            )
    _check_pass(model, built, seq_len)


def own_param_specs(model: OwnModel, seq_len: int) -> tuple[ParamSpec, ...]:
    """Return full name and shape of every parameter. Raises InputError if the model cannot be
    built.
    """
    built = build_own_model(model, seq_len)
    return tuple(ParamSpec(name, tuple(param.shape)) for name, param in built.named_parameters())


def initialise_own_model(params: LocalParams, model: nn.Module, seed: int) -> None:
    """Fill every parameter and buffer of a materialised model, sharded or not. No communication."""
    specs = {spec.name: spec for spec in params.specs}
    normal_of = getattr(model, "normal_of", _normal_of)
    for index, held in enumerate(params.slices):
        mean, std = normal_of(held.name)
        values = _draw(specs[held.name], held, seed, std) if std > 0 else torch.zeros(held.shape)
        params.write(index, values + mean)
    if hasattr(model, "fill_buffers"):
        cast(Any, model).fill_buffers()


def _draw(spec: ParamSpec, held: ParamSlice, seed: int, std: float) -> Tensor:
    """Return the normal values of a slice. They are drawn by indices of the first dimension, of
    which each has several rows if the parameter has more than two dimensions.
    """
    rows_per_draw = prod(spec.shape[1:-1])
    num_cols = spec.matrix_shape[1]
    first = held.rows[0] // rows_per_draw
    end = -(-held.rows[1] // rows_per_draw)
    drawn = torch.empty(end - first, rows_per_draw * num_cols)
    fill_normal(drawn, f"{seed}/{held.name}", first, 0, rows_per_draw * num_cols, std)
    skipped = first * rows_per_draw
    return drawn.view(-1, num_cols)[
        held.rows[0] - skipped : held.rows[1] - skipped, slice(*held.cols)
    ]


def own_model_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the cross-entropy summed over valid targets, 0-dim fp32. Padding is a token below 0
    and is replaced by token 0.
    """
    logits_BSV = model(batch.tokens_BS.clamp(min=0))
    targets = batch.targets_BS.flatten()
    return F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), targets.clamp(min=-1), ignore_index=-1, reduction="sum"
    )


def _normal_of(name: str) -> tuple[float, float]:
    if name.endswith("norm.weight"):
        return 1.0, 0.0
    return 0.0, 0.0 if name.endswith(".bias") else STD


def _check_axes(model: OwnModel, axes: tuple[str, ...], degrees: Degrees) -> None:
    if not axes or not set(axes) <= set(AXES):
        raise InputError(
            f"{KEY}: {model.name}.axes is {axes}; allowed: {' and '.join(AXES)}, or one of them"
        )
    used = {
        axis: getattr(degrees, axis)
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    }
    if other := [
        f"{axis} {degree}" for axis, degree in used.items() if degree > 1 and axis not in axes
    ]:
        raise InputError(
            f"island.mesh: {', '.join(other)}, but {model.name} is spread over "
            f"{' and '.join(axes)} only (its `axes`); "
            "set the others to 1"
        )


def _check_pass(model: OwnModel, built: nn.Module, seq_len: int) -> None:
    with _explained(f"failed on tokens of shape (2, {seq_len}):"):
        logits = built(torch.zeros(2, seq_len, dtype=torch.int64, device="meta"))
    if (
        not isinstance(logits, Tensor)
        or logits.shape[:-1] != (2, seq_len)
        or logits.shape[-1] < model.vocab_size
    ):
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InputError(
            f"{KEY}: {model.name} maps tokens (2, {seq_len}) to {got}; need logits (2, {seq_len}, "
            f"{model.vocab_size})"
        )
    with _explained("failed in the backward:"):
        logits.float().sum().backward()
    if unused := [name for name, param in built.named_parameters() if param.grad is None]:
        raise InputError(
            f"{KEY}: {model.name} has {unused[0]}, which gets no gradient; leave out parameters "
            "that are not used"
        )


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise InputError(
            f"{KEY}: the own model {what} {summarise(error)}; see model.options"
        ) from error


def _arguments(model: OwnModel) -> str:
    return ", ".join(["vocab_size", "seq_len", *model.options])
