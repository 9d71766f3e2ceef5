"""Tensor parallelism: each rank of `tp` holds a block of every matrix; with sequence parallelism, of the stream too.

embed                      rows (vocabulary)
q, k, v, gate, up          rows: heads and hidden units          x gathered once before them
out, down                  columns                               partial sums scattered (or all-reduced) after
norms                      replicated, each on its positions
head                       rows (vocabulary)                     logits stay cut; two small all-reduces a chunk
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

from inner.loss import ChunkedCrossEntropy, VocabShard
from inner.model import Block, Head, Transformer

POSITIONS, HEADS = 1, 2
"""Dims of x_BSD and q_BSHE."""


def split_matrices(part: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cuts every parameter over the 1-D `mesh`; activations follow. Every rank must call it, before FSDP."""
    stream: Placement = Shard(POSITIONS) if sequence_parallel else Replicate()
    norm = SequenceParallel(sequence_dim=POSITIONS) if sequence_parallel else ReplicatedModule()
    for layer in part.blocks():
        _split_block(layer, mesh, stream, norm)
    plan: dict[str, ParallelStyle] = {}
    if part.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        # What comes out is still under way; a compiled block cannot begin with that.
        part.enter = funcol.wait_tensor
    if part.norm is not None:
        plan |= {"norm": norm, "head": VocabParallelHead(stream)}
    if plan:
        parallelize_module(part, mesh, plan)


def _split_block(layer: Block, mesh: DeviceMesh, stream: Placement, norm: ParallelStyle) -> None:
    attention = layer.attention
    kv_heads = attention.k_proj.out_features // attention.head_dim
    shares_kv_heads = kv_heads < mesh.size()
    if shares_kv_heads:
        # Fewer key-value heads than ranks: each rank projects all of them and reads the one its queries share.
        mine = mesh.get_local_rank() * kv_heads // mesh.size()
        attention.kv_heads = slice(mine, mine + 1)
    rows = ColwiseParallel()
    kv_rows = ReplicatedModule(gradient=Partial()) if shares_kv_heads else rows
    columns = RowwiseParallel(output_layouts=stream)
    plan: dict[str, ParallelStyle] = {
        "attention_norm": norm,
        # One gather for q, k and v.
        "attention": PrepareModuleInput(
            input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.q_proj": rows,
        "attention.k_proj": kv_rows,
        "attention.v_proj": kv_rows,
        "attention.out_proj": columns,
        "ffn_norm": norm,
        "ffn": PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate()),
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
    """Every rank computes the same from the same; `gradient`: what the ranks' gradients of the output are."""

    def __init__(self, gradient: Placement | None = None) -> None:
        self.gradient = gradient or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())
        module.register_forward_pre_hook(partial(_enter, device_mesh))
        module.register_forward_hook(partial(_leave, self.gradient))
        return module


def _enter(mesh: DeviceMesh, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x = inputs[0]
    return (x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False),)


def _leave(gradient: Placement, _: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
    assert isinstance(output, DTensor)
    return output.to_local(grad_placements=[gradient])


class VocabParallelHead(ParallelStyle):
    """Each rank scores its rows of the vocabulary, for all positions; logits are never gathered."""

    def __init__(self, stream: Placement) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Head)
        _distribute(module, device_mesh, Shard(0))
        assert isinstance(module.cross_entropy, ChunkedCrossEntropy)
        module.cross_entropy = VocabParallelCrossEntropy(device_mesh, module.cross_entropy)
        module.register_forward_pre_hook(partial(self._gather, device_mesh))
        return module

    def _gather(
        self, mesh: DeviceMesh, _: nn.Module, inputs: tuple[Tensor, Tensor | None, Tensor | None]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, tied_VD, targets_BS = inputs
        assert targets_BS is not None, "a tensor-parallel head gives the loss, not logits"
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [self.stream], run_check=False)
        # Each rank's columns give a share of the gradient of x.
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]), tied_VD, targets_BS


class VocabParallelCrossEntropy:
    """Summed cross-entropy over a table cut by rows over the ranks of `mesh`."""

    def __init__(self, mesh: DeviceMesh, whole: ChunkedCrossEntropy) -> None:
        self._mesh = mesh
        self._whole = whole

    def __call__(self, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
        assert isinstance(weight_VD, DTensor)
        _, offset = compute_local_shape_and_global_offset(weight_VD.shape, self._mesh, weight_VD.placements)
        shard = VocabShard(self._mesh.get_group(), start=offset[0])
        return ChunkedCrossEntropy(self._whole.chunk_tokens, shard)(x_TD, weight_VD.to_local(), targets_T)


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, param in list(module.named_parameters(recurse=False)):
        # No rank's values are sent: parameters are on the meta device, initial values are the same everywhere.
        cut = distribute_tensor(param.data, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(cut))
