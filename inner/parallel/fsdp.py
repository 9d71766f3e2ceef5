"""FSDP in an island: one code path for one process, replicas (DDP), shards (ZeRO-2 and ZeRO-3) and both (HSDP)."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from inner.model import Transformer


def shard(part: Transformer, mesh: DeviceMesh, compute_dtype: torch.dtype, *, reshard: bool) -> None:
    """Makes every parameter an fp32 DTensor on `mesh`, IslandMesh.fsdp.

    Every rank must call it. Gradients are summed in fp32. Computes in `compute_dtype`; logits come out in fp32.
    `reshard`: a block's weights are freed after its forward and gathered again for its backward (ZeRO-3), else kept
    until then (ZeRO-2).
    """
    # Inputs are not cast: the RoPE table is fp32 and must stay so; the embedding sets the stream's dtype.
    inside = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Only where logits come out: fp32 from a block would meet the next block's weights in compute_dtype.
    last = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in part.blocks():
        fully_shard(layer, mesh=mesh, mp_policy=inside, reshard_after_forward=reshard)
    # What the root holds is needed first in the backward: freeing it would only gather it twice.
    fully_shard(part, mesh=mesh, mp_policy=last if part.stage.is_last else inside, reshard_after_forward=False)
    for module in fsdp_modules(part):
        # Losses are already divided by the global token count, so gradients add up. gloo has no other sum:
        # a divide factor without force_sum asks for PREMUL_SUM. One rank alone would divide into a copy.
        module.set_force_sum_reduction_for_comms(True)
        if mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The wrapped modules: every block and the root."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reduce_on_backward(model: nn.Module, is_last: bool) -> None:
    """Gradients cross the mesh in the last micro-batch's backward only; until then they add up locally."""
    assert isinstance(model, FSDPModule), "shard() comes first"
    model.set_requires_gradient_sync(is_last)


def drop_gathered(model: nn.Module) -> None:
    """Frees what a forward without backward left gathered; else the next forward would use stale weights."""
    for module in fsdp_modules(model):
        module.reshard()
