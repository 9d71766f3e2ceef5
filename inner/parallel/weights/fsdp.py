"""FSDP within an island: one code path for replicas (DDP), shards (ZeRO-2 and ZeRO-3) and both
(HSDP).

A mesh of one rank does not need FSDP, and the functions here do nothing on it: see
compute_copies.py.
"""

from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from inner.model.experts import Mixture, mixtures
from inner.model.transformer import Transformer
from inner.params import local_tensor


def apply_fsdp(
    model: Transformer,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    *,
    reshard: bool,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Make every parameter an fp32 DTensor on `mesh`, which is IslandMesh.fsdp. Every rank must
    call it.

    The model computes in `compute_dtype` and returns logits in fp32; gradients are summed in fp32.
    With `reshard`, a block's weights are freed after its forward and gathered again for its
    backward (ZeRO-3); otherwise they are kept until the backward (ZeRO-2). `expert_mesh`:
    IslandMesh.edp, if experts are spread in another way than other weights.
    """
    # Inputs are not cast, because the RoPE table must stay fp32; the embedding sets the dtype of
    # the stream.
    inside = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # Only the last stage returns fp32: the fp32 output of a block would meet the next block's
    # weights in compute_dtype.
    last = replace(inside, output_dtype=torch.float32)
    exact = replace(inside, param_dtype=torch.float32)
    for mixture in mixtures([model]):
        if compute_dtype != torch.float32:
            # The dtype belongs to a group, so a router that computes in fp32 is a group of its own.
            fully_shard(mixture.router, mesh=mesh, mp_policy=exact, reshard_after_forward=reshard)
        if expert_mesh is not None:
            shard = partial(
                _expert_placement, num_shards=expert_mesh.size(-1), num_held=_num_held(mixture)
            )
            options = {
                "mp_policy": inside,
                "reshard_after_forward": reshard,
                "shard_placement_fn": shard,
            }
            fully_shard(mixture.experts, mesh=expert_mesh, **options)
    for layer in model.blocks():
        fully_shard(layer, mesh=mesh, mp_policy=inside, reshard_after_forward=reshard)
    if model.embed is not None and not model.sizes.tie_embeddings:
        options = {"mp_policy": inside, "reshard_after_forward": reshard}
        if model.position is None:
            fully_shard(model.embed, mesh=mesh, **options)
        else:
            fully_shard([model.embed, model.position], mesh=mesh, **options)
        # The backward of an embedding needs no weights.
        cast(FSDPModule, model.embed).set_unshard_in_backward(False)
    # The backward begins with these weights, so freeing them after the forward would only cost
    # another gather. A tied table belongs to the root, which is not freed either.
    if model.norm is not None and model.head is not None and not model.sizes.tie_embeddings:
        fully_shard(
            [model.norm, model.head], mesh=mesh, mp_policy=inside, reshard_after_forward=False
        )
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=last if model.stage.is_last else inside,
        reshard_after_forward=False,
    )
    _sum_gradients(model)


def _num_held(mixture: Mixture) -> int:
    """Return the number of experts that this rank of ep holds."""
    return local_tensor(mixture.experts.gate_proj.weight).shape[0]


def _expert_placement(param: nn.Parameter, num_shards: int, num_held: int) -> Shard | None:
    """Shard experts whole. With more ranks than experts, shard the rows of each of them."""
    return Shard(1) if num_shards > num_held else None


def apply_block_fsdp(
    model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype, *, reshard: bool
) -> None:
    """Do the same for a model whose blocks in `layers` are the only known modules. All other
    parameters form one group.
    """
    inside = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh, mp_policy=inside, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=inside, reshard_after_forward=False)
    _sum_gradients(model)


def _sum_gradients(model: nn.Module) -> None:
    for module in fsdp_modules(model):
        # Losses are already divided by the global token count, so gradients are summed and not
        # averaged. force_sum is needed by gloo, which does not have PREMUL_SUM.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules wrapped by FSDP: every block, the ends of the model, and the root."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def free_gathered_weights(model: nn.Module) -> None:
    """Free weights that a forward without a backward has left gathered, because the next forward
    would use old values.
    """
    for module in fsdp_modules(model):
        module.reshard()
