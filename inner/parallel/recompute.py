"""Activation checkpointing: the backward of a block recomputes activations that its forward did not
keep.

    none        everything is kept
    attention   each block's attention is recomputed, including its projections
    selective   matrix products, attention kernels and collectives are kept, and the cheap rest is
                recomputed
    full        only a block's input is kept

A block's last matrix product is needed only by the next block, and is never recomputed.

torch.utils.checkpoint is not used, because a zero-bubble pipeline computes the gradients of inputs
and of weights in two or more backward passes. torch would recompute a block in each of them, or
fail with `selective`. Here a block is recomputed once, when its first tensor is needed, and each
tensor then lives as long as the graph refers to it.
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
from inner.model.kept import KeptValues
from inner.parallel.kept_operators import KEPT_OPERATORS, keep_and_reuse


def apply_recompute(model: nn.Module, kind: Recompute) -> None:
    """Let the blocks in `model.layers` recompute according to `kind`. Gradients and parameter names
    do not change.

    Call it after tensor and context parallelism, before compile_blocks and FSDP. A block's backward
    repeats its collectives, so all ranks of these collectives must use the same kind.
    """
    for layer in model.get_submodule("layers").children():
        if kind == "attention":
            _set_forward(layer.get_submodule("attention"), _keep_inputs)
        elif kind == "selective":
            _set_forward(layer, _keep_expensive)
        elif kind == "full":
            _set_forward(layer, _keep_inputs)


def _set_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    # A wrapper module would change the names and put FSDP's hooks inside the repeated part. A
    # method is used instead of a partial, so that torch.compile sees that all blocks share it and
    # compiles one graph.
    assert "forward" not in vars(module), (
        "only a forward that is defined in the class can be repeated"
    )
    module.forward = MethodType(forward, module)


def _keep_inputs(module: nn.Module, *args: Any) -> Tensor:
    return _forward(module, args, is_selective=False)


def _keep_expensive(module: nn.Module, *args: Any) -> Tensor:
    return _forward(module, args, is_selective=True)


def _forward(module: nn.Module, args: tuple[Any, ...], is_selective: bool) -> Tensor:
    forward = partial(type(module).forward, module, *args)
    if torch.compiler.is_compiling():
        # torch's own checkpoint is used while compiling: the compiler must see which tensors are
        # kept, and it builds a single backward in any case.
        options: dict[str, Any] = {"context_fn": _selective_contexts} if is_selective else {}
        return checkpoint(
            type(module).forward,
            module,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            **options,
        )
    if not torch.is_grad_enabled():
        return forward()
    around_forward, around_repetition = keep_and_reuse() if is_selective else noop_context_fn()
    call = _RepeatableCall(forward, around_repetition)
    with call.kept.first(), saved_tensors_hooks(call.pack, call.unpack), around_forward:
        return forward()


def _selective_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return torch's contexts around a forward and its repetition that keep the results of
    KEPT_OPERATORS.
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(
    _context: object, operator: object, *_args: object, **_kwargs: object
) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if operator in KEPT_OPERATORS
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


class _SavedTensor:
    """A placeholder that autograd holds instead of a tensor."""

    value: Tensor | None = None


class _RepetitionDone(Exception):
    """The repetition has produced the last tensor that the backward needs."""


class _RepeatableCall:
    """One call of a forward that can be repeated. It lives as long as autograd holds one of its
    tensors.
    """

    def __init__(self, repeat: Callable[[], Tensor], around: AbstractContextManager) -> None:
        self._repeat = repeat
        self._around = around
        self.kept = KeptValues()
        """What the first forward decided, for the repetition."""
        # The references are weak, so that a tensor is freed once the backward is done with it, and
        # the call with its last tensor.
        self._saved: list[ref[_SavedTensor]] = []

    def pack(self, _: Tensor) -> _SavedTensor:
        saved = _SavedTensor()
        self._saved.append(ref(saved))
        return saved

    def unpack(self, saved: _SavedTensor) -> Tensor:
        if saved.value is None:
            self._recompute()
        assert saved.value is not None, "a repeated forward must save the same tensors as the first"
        return saved.value

    def _recompute(self) -> None:
        """Repeat the forward and fill the placeholders with the tensors that it saves, in the same
        order.
        """
        remaining = iter(self._saved)
        num_left = len(self._saved)

        def fill_next(tensor: Tensor) -> Tensor:
            nonlocal num_left
            saved = next(remaining)()
            # Detach the tensor: an output held by its own autograd node would form a cycle and
            # never be freed.
            value = tensor.detach()
            if saved is not None:
                saved.value = value
            num_left -= 1
            if num_left == 0:
                raise _RepetitionDone
            return value

        try:
            hooks = saved_tensors_hooks(fill_next, lambda tensor: tensor)
            with self.kept.again(), torch.enable_grad(), hooks, self._around:
                self._repeat()
        except _RepetitionDone:
            return
        raise AssertionError(
            f"a repeated forward saved {num_left} fewer tensors than the first forward"
        )
