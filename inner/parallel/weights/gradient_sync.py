"""Controls FSDP in a backward: over which ranks it reduces gradients, when it treats the backward
as finished, and whether it frees weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


def set_gradient_sync(model: nn.Module, *, over_shards: bool, over_replicas: bool) -> None:
    """Choose the axes over which the next backward reduces gradients. Without shards, whole
    gradients accumulate on the rank.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(over_shards)
        model.set_requires_all_reduce(over_replicas)


@contextmanager
def one_backward(model: nn.Module) -> Iterator[None]:
    """Treat all calls of autograd inside the block as one backward. FSDP adds up and reduces the
    gradients at its end.

    One half of a split backward consists of many calls. In some of them FSDP would not see the
    gradients, and after others it would end the backward too early.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    state = model._get_fsdp_state()
    # Keep FSDP from asking autograd to call the final callback at the end of the first call.
    state._state_ctx.post_backward_final_callback_queued = True
    yield
    state._root_post_backward_final_callback()


def set_freeing(model: nn.Module, *, after_backward: bool) -> None:
    """Choose whether the next backward frees the weights that it has used, or keeps them
    gathered.
    """
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(after_backward)


def keep_weights(model: nn.Module) -> None:
    """Let the next backward keep weights gathered, and not wait for reduced gradients."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(False)
