"""Tensor parallelism: each rank of `tp` holds a block of every matrix, and of the stream with sequence parallelism.

embed                      rows (vocabulary)
q, k, v, gate, up          rows: heads and hidden units          x is gathered once before them
out, down                  columns                               partial sums are scattered (or all-reduced) after
norms                      replicated; each rank norms its own positions
head                       rows (vocabulary)                     logits stay sharded; two small all-reduces a chunk
"""

from functools import partial

import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from inner.model.loss import ChunkedCrossEntropy, VocabShard
from inner.model.transformer import Block, Head, Transformer

POSITIONS, HEADS = 1, 2
"""Dimensions of x_BSD and q_BSHE."""


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Shard every parameter over the 1-D `mesh`, and activations with them. Every rank must call it, before FSDP."""
    stream: Placement = Shard(POSITIONS) if sequence_parallel else Replicate()
    norm = SequenceParallel(sequence_dim=POSITIONS) if sequence_parallel else ReplicatedModule()
    for layer in model.blocks():
        _split_block(layer, mesh, stream, norm)
    plan: dict[str, ParallelStyle] = {}
    if model.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        # The embedding returns an asynchronous tensor, which a compiled block cannot take as input.
        model.enter = funcol.wait_tensor
    if model.norm is not None:
        plan |= {"norm": norm, "head": VocabParallelHead(stream)}
    if plan:
        parallelize_module(model, mesh, plan)


def _split_block(layer: Block, mesh: DeviceMesh, stream: Placement, norm: ParallelStyle) -> None:
    attention = layer.attention
    kv_heads = attention.k_proj.out_features // attention.head_dim
    shares_kv_heads = kv_heads < mesh.size()
    if shares_kv_heads:
        # With fewer key-value heads than ranks, each rank projects all of them and reads the one its queries share.
        mine = mesh.get_local_rank() * kv_heads // mesh.size()
        attention.kv_heads = slice(mine, mine + 1)
    whole, rows = Replicate(), ColwiseParallel()
    kv_rows = ReplicatedModule(gradient=Partial()) if shares_kv_heads else rows
    columns = RowwiseParallel(output_layouts=stream)
    plan: dict[str, ParallelStyle] = {
        "attention_norm": norm,
        # A single gather serves q, k and v.
        "attention": PrepareModuleInput(input_layouts=(stream, None, None), desired_input_layouts=(whole, None, None)),
        "attention.q_proj": rows,
        "attention.k_proj": kv_rows,
        "attention.v_proj": kv_rows,
        "attention.out_proj": columns,
        "ffn_norm": norm,
        "ffn": PrepareModuleInput(input_layouts=stream, desired_input_layouts=whole),
        "ffn.gate_proj": rows,
        "ffn.up_proj": rows,
        "ffn.down_proj": columns,
    }
    if attention.q_norm is not None:
        # Each rank norms its own heads, so the weight's gradient is a sum over ranks, as under sequence parallelism.
        per_head = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
        plan |= {"attention.q_norm": per_head, "attention.k_norm": per_head}
    parallelize_module(layer, mesh, plan)


class ReplicatedModule(ParallelStyle):
    """Every rank computes the same result from the same input; `gradient` is the placement of the output's gradient."""

    def __init__(self, gradient: Placement | None = None) -> None:
        self.gradient = gradient or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())
        module.register_forward_pre_hook(partial(_to_dtensor, device_mesh))
        module.register_forward_hook(partial(_to_local, self.gradient))
        return module


def _to_dtensor(mesh: DeviceMesh, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x = inputs[0]
    return (x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False),)


def _to_local(gradient: Placement, _: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
    assert isinstance(output, DTensor)
    return output.to_local(grad_placements=[gradient])


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
    assert isinstance(weight_VD, DTensor)
    _, offset = compute_local_shape_and_global_offset(weight_VD.shape, mesh, weight_VD.placements)
    shard = VocabShard(mesh.get_group(), start=offset[0])
    return ChunkedCrossEntropy(chunk, shard)(x_TD, weight_VD.to_local(), targets_T)


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, param in list(module.named_parameters(recurse=False)):
        # No values are sent: parameters are on the meta device, and initial values are the same on every rank.
        sharded = distribute_tensor(param.data, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(sharded))
