"""FSDP within an island: one code path for one process, replicas (DDP), shards (ZeRO-2 and ZeRO-3) and both (HSDP)."""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from inner.model.transformer import Transformer


def apply_fsdp(model: Transformer, mesh: DeviceMesh, compute_dtype: torch.dtype, *, reshard: bool) -> None:
    """Make every parameter an fp32 DTensor on `mesh`, which is IslandMesh.fsdp. Every rank must call it.

    The model computes in `compute_dtype` and returns logits in fp32; gradients are summed in fp32. With `reshard`, a
    block's weights are freed after its forward and gathered again for its backward (ZeRO-3); otherwise they are kept
    in between (ZeRO-2).
    """
    # Inputs are not cast, because the RoPE table must stay fp32; the embedding sets the dtype of the stream.
    inside = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Only the last stage returns fp32: after a block, fp32 would meet the next block's weights in compute_dtype.
    last = replace(inside, output_dtype=torch.float32)
    for layer in model.blocks():
        fully_shard(layer, mesh=mesh, mp_policy=inside, reshard_after_forward=reshard)
    # The backward needs the root's parameters first, so freeing them would only gather them twice.
    fully_shard(model, mesh=mesh, mp_policy=last if model.stage.is_last else inside, reshard_after_forward=False)
    for module in fsdp_modules(model):
        # Losses are already divided by the global token count, so gradients are summed. force_sum is for gloo, which
        # lacks PREMUL_SUM. A single rank would copy its gradients in order to divide them.
        module.set_force_sum_reduction_for_comms(True)
        if mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules wrapped by FSDP: every block and the root."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_gradient_sync(model: nn.Module, is_last: bool) -> None:
    """Reduce gradients over the mesh only in the last micro-batch's backward; before that they accumulate locally."""
    assert isinstance(model, FSDPModule), "apply_fsdp() comes first"
    model.set_requires_gradient_sync(is_last)


def free_gathered_weights(model: nn.Module) -> None:
    """Free weights that a forward without backward left gathered; the next forward would use stale values."""
    for module in fsdp_modules(model):
        module.reshard()
