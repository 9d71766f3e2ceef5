"""Tensor parallelism: each rank of `tp` holds a block of every matrix, and of the stream with sequence parallelism.

embed                      rows (vocabulary)
q, k, v, gate, up          rows: heads and hidden units          x is gathered once before them
out, down                  columns                               partial sums are scattered (or all-reduced) after
norms                      replicated; each rank norms its own positions
head                       rows (vocabulary)                     logits stay sharded; two small all-reduces a chunk
"""

from functools import partial
from types import MethodType

import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from inner.model.loss import ChunkedCrossEntropy, VocabShard
from inner.model.transformer import Block, Head, Transformer

POSITIONS = 1
"""Dimension of x_BSD."""


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Shard every parameter over the 1-D `mesh`, and activations with them. Every rank must call it, before FSDP."""
    stream: Placement = Shard(POSITIONS) if sequence_parallel else Replicate()
    for layer in model.blocks():
        _split_block(layer, mesh, stream)
    plan: dict[str, ParallelStyle] = {}
    if model.embed is not None:
        plan["embed"] = VocabParallelEmbedding(stream)
        # The embedding returns an asynchronous tensor, which a compiled block cannot take as input.
        model.enter = funcol.wait_tensor
    if model.norm is not None:
        plan |= {"norm": LocalModule(), "head": VocabParallelHead(stream)}
    if plan:
        parallelize_module(model, mesh, plan)


def _split_block(layer: Block, mesh: DeviceMesh, stream: Placement) -> None:
    attention = layer.attention
    kv_heads = attention.k_proj.out_features // attention.head_dim
    shares_kv_heads = kv_heads < mesh.size()
    if shares_kv_heads:
        # With fewer key-value heads than ranks, each rank projects all of them and reads the one its queries share.
        mine = mesh.get_local_rank() * kv_heads // mesh.size()
        attention.kv_heads = slice(mine, mine + 1)
    whole, rows = Replicate(), ColwiseParallel()
    kv_rows = LocalModule() if shares_kv_heads else rows
    columns = RowwiseParallel(output_layouts=stream)
    plan: dict[str, ParallelStyle] = {
        "attention_norm": LocalModule(),
        # A single gather serves q, k and v.
        "attention": PrepareModuleInput(input_layouts=(stream, None, None), desired_input_layouts=(whole, None, None)),
        "attention.q_proj": rows,
        "attention.k_proj": kv_rows,
        "attention.v_proj": kv_rows,
        "attention.out_proj": columns,
        "ffn_norm": LocalModule(),
        "ffn": PrepareModuleInput(input_layouts=stream, desired_input_layouts=whole),
        "ffn.gate_proj": rows,
        "ffn.up_proj": rows,
        "ffn.down_proj": columns,
    }
    if attention.q_norm is not None:
        plan |= {"attention.q_norm": LocalModule(), "attention.k_norm": LocalModule()}
    parallelize_module(layer, mesh, plan)


class LocalModule(ParallelStyle):
    """Every rank holds the whole weight and computes with it on what it has of the input, without DTensor.

    Where ranks have different inputs, the gradient is a part of the sum over them: see gradients.sum_over_tensor_ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())
        module.forward = MethodType(_forward_locally, module)
        return module


def _forward_locally(module: nn.Linear | nn.RMSNorm, x: Tensor) -> Tensor:
    weight = _local(module.weight)
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(x, module.normalized_shape, weight, module.eps)
    # Each rank goes on with other columns of the result, so it has a part of the gradient of x.
    x_BSD = x.to_local(grad_placements=[Partial()]) if isinstance(x, DTensor) else x
    return F.linear(x_BSD, weight, None if module.bias is None else _local(module.bias))


class VocabParallelEmbedding(ParallelStyle):
    """Each rank looks up the tokens of its rows of the vocabulary; the sum over ranks is the stream.

    DTensor's own would compute the gradient of the whole table on every rank.
    """

    def __init__(self, stream: Placement) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Shard(0))
        module.forward = MethodType(partial(_embed_here, device_mesh, self.stream), module)
        return module


def _embed_here(mesh: DeviceMesh, stream: Placement, module: nn.Embedding, tokens_BS: Tensor) -> Tensor:
    weight_VD = _local(module.weight)
    rows_BS = tokens_BS - _first_row(module.weight)
    is_elsewhere_BS = (rows_BS < 0) | (rows_BS >= weight_VD.shape[0])
    x_BSD = F.embedding(rows_BS.masked_fill(is_elsewhere_BS, 0), weight_VD)
    x_BSD = x_BSD.masked_fill(is_elsewhere_BS[..., None], 0.0)
    return DTensor.from_local(x_BSD, mesh, [Partial()], run_check=False).redistribute(placements=[stream]).to_local()


class VocabParallelHead(ParallelStyle):
    """Each rank scores its rows of the vocabulary for all positions; logits are never gathered."""

    def __init__(self, stream: Placement) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Head)
        _distribute(module, device_mesh, Shard(0))
        assert isinstance(module.cross_entropy, ChunkedCrossEntropy)
        module.cross_entropy = partial(_sharded_cross_entropy, device_mesh, module.cross_entropy.chunk_tokens)
        module.register_forward_pre_hook(partial(self._gather, device_mesh))
        return module

    def _gather(
        self, mesh: DeviceMesh, _: nn.Module, inputs: tuple[Tensor, Tensor | None, Tensor | None]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, tied_VD, targets_BS = inputs
        assert targets_BS is not None, "a tensor-parallel head computes the loss, not logits"
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [self.stream], run_check=False)
        # Each rank contributes a partial sum to the gradient of x.
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]), tied_VD, targets_BS


def _sharded_cross_entropy(mesh: DeviceMesh, chunk: int, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """Summed cross-entropy over a table whose rows are sharded over the ranks of `mesh`."""
    shard = VocabShard(mesh.get_group(), start=_first_row(weight_VD))
    return ChunkedCrossEntropy(chunk, shard)(x_TD, _local(weight_VD), targets_T)


def _local(weight: Tensor) -> Tensor:
    """This rank's rows of a weight, or all of it; gradients flow back."""
    assert isinstance(weight, DTensor)
    return weight.to_local()


def _first_row(weight: Tensor) -> int:
    """Index of this rank's first row."""
    assert isinstance(weight, DTensor)
    return compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)[1][0]


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, param in list(module.named_parameters(recurse=False)):
        # No values are sent: parameters are on the meta device, and initial values are the same on every rank.
        sharded = distribute_tensor(param.data, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(sharded))
