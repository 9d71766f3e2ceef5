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
    yield
    state._root_post_backward_final_callback()


def keep_weights(model: nn.Module) -> None:
    """Let the next backward leave weights gathered, and the reduced gradients be waited for later."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(False)
