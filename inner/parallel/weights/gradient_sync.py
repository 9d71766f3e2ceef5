"""What FSDP does with gradients in a backward: over which ranks it reduces them, and when the backward is over."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


def set_gradient_sync(model: nn.Module, *, over_shards: bool, over_replicas: bool) -> None:
    """Say over what the next backward reduces gradients; without shards they add up on the rank, whole."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(over_shards)
        model.set_requires_all_reduce(over_replicas)


@contextmanager
def one_backward(model: nn.Module) -> Iterator[None]:
    """Let all calls of autograd inside be one backward, at whose end FSDP adds up and reduces what they have computed.

    Half of a split backward is many calls. FSDP would not see the gradients of some, and end the backward in others.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    state = model._get_fsdp_state()
    # So it does not ask autograd to call it at the end of the first one.
    state._state_ctx.post_backward_final_callback_queued = True
    # torch 2.15 notes at that point who ends the backward, and refuses to end one without the note.
    state._state_ctx.manual_backward_finalization_active = False  # pyright: ignore - older ones lack it
    yield
    state._root_post_backward_final_callback()


def keep_weights(model: nn.Module) -> None:
    """Let the next backward leave weights gathered, and the reduced gradients be waited for later."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(False)


def keep_reducing_in_backwards(model: nn.Module) -> None:
    """Keep the pipelines of torch 2.15 from putting off the reductions of all micro-batches to the end of the step."""
    if isinstance(model, FSDPModule):
        # A plain attribute of the module goes before the method of its class, which their stages call.
        model.set_manual_backward_finalization = lambda enabled: None  # pyright: ignore - what Module declares


def end_step(model: nn.Module) -> None:
    """Free gathered weights, and wait until the gradients of the step's last backward are reduced."""
    assert isinstance(model, FSDPModule), "only FSDP's stages leave weights gathered"
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = model._get_fsdp_state()
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()
