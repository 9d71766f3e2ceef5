"""Activation checkpointing: a block's backward computes again what its forward did not keep.

    none        everything is kept
    attention   each block's attention is computed again, with its projections
    selective   matrix products, attention kernels and collectives are kept, the cheap rest is computed again
    full        only a block's input is kept

A block's last matrix product feeds nothing but the next block, and is never repeated.

Why not torch.utils.checkpoint: a zero-bubble pipeline takes the gradients of inputs and of weights in two backward
passes and more, and it would compute a block again in each of them, or with `selective` refuse. Here a block is
computed again once, when its first tensor is asked for; each tensor then lives as long as the graph wants it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from inner.config import Recompute

# Not bmm: only attention without a kernel of its own has it, for all pairs of positions.
KEPT = {
    operator
    for library, names in {
        "aten": (
            "mm",
            "addmm",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        ),
        "_c10d_functional": ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"),
    }.items()
    for name in names
    for operator in [getattr(getattr(torch.ops, library), name).default]
}


def apply_recompute(part: nn.Module, kind: Recompute) -> None:
    """Lets the blocks in `part.layers` compute again what `kind` says; gradients and names stay the same.

    Call it after tensor and context parallelism, before compile_blocks and FSDP. Ranks that share a block's
    collectives repeat those in its backward, so all must be given the same kind.
    """
    for layer in part.get_submodule("layers").children():
        if kind == "attention":
            _set_forward(layer.get_submodule("attention"), _keep_inputs)
        elif kind == "selective":
            _set_forward(layer, _keep_expensive)
        elif kind == "full":
            _set_forward(layer, _keep_inputs)


def _set_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    # No wrapper module: that would change the names, and FSDP's hooks must stay outside of what is repeated. A method
    # and not a partial: torch.compile sees that it is the same for all blocks and compiles one graph.
    assert "forward" not in vars(module), "the class's forward is what is repeated"
    module.forward = MethodType(forward, module)


def _keep_inputs(module: nn.Module, *args: Any) -> Tensor:
    return _forward(module, args, is_selective=False)


def _keep_expensive(module: nn.Module, *args: Any) -> Tensor:
    return _forward(module, args, is_selective=True)


def _forward(module: nn.Module, args: tuple[Any, ...], is_selective: bool) -> Tensor:
    forward = partial(type(module).forward, module, *args)
    if torch.compiler.is_compiling():
        # The compiler must see what is kept, and makes one backward of it anyway.
        options: dict[str, Any] = {"context_fn": _contexts} if is_selective else {}
        return checkpoint(type(module).forward, module, *args, use_reentrant=False, preserve_rng_state=False, **options)
    if not torch.is_grad_enabled():
        return forward()
    around_forward, around_repetition = _contexts() if is_selective else noop_context_fn()
    call = _Call(forward, around_repetition)
    with saved_tensors_hooks(call.pack, call.unpack), around_forward:
        return forward()


def _contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """What goes around a forward, and around its repetition, for operators in KEPT to be kept."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(_context: object, operator: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _Saved:
    """What autograd holds in place of a tensor."""

    value: Tensor | None = None


class _Finished(Exception):
    """The repetition has come to the last tensor that the backward needs."""


class _Call:
    """One call of a forward, and how to repeat it. It lives as long as autograd holds one of its tensors."""

    def __init__(self, repeat: Callable[[], Tensor], around: AbstractContextManager) -> None:
        self._repeat = repeat
        self._around = around
        # Weak: a tensor that the backward is done with must go, and the call with the last of them.
        self._saved: list[ref[_Saved]] = []

    def pack(self, _: Tensor) -> _Saved:
        saved = _Saved()
        self._saved.append(ref(saved))
        return saved

    def unpack(self, saved: _Saved) -> Tensor:
        if saved.value is None:
            self._fill()
        assert saved.value is not None, "a repeated forward must do what the first did"
        return saved.value

    def _fill(self) -> None:
        """Repeats the forward and hands out the tensors that it would save, in the same order."""
        left = iter(self._saved)
        num_left = len(self._saved)

        def hand_out(tensor: Tensor) -> Tensor:
            nonlocal num_left
            saved = next(left)()
            # Detached: an output that its own node holds would hold the node, and be freed never.
            value = tensor.detach()
            if saved is not None:
                saved.value = value
            num_left -= 1
            if num_left == 0:
                raise _Finished
            return value

        try:
            with torch.enable_grad(), saved_tensors_hooks(hand_out, _same), self._around:
                self._repeat()
        except _Finished:
            return
        raise AssertionError(f"a repeated forward saved {num_left} tensors less than the first")


def _same(tensor: Tensor) -> Tensor:
    return tensor
