"""Tensor parallelism: each rank of `tp` holds a block of every matrix, and of the stream with
sequence parallelism.

embed                      rows (vocabulary)
q, k, v, gate, up          rows: heads and hidden units          x is gathered once before
out, down                  columns                               sums are scattered or reduced after
norms                      replicated; each rank norms its own positions
head                       rows (vocabulary)                     logits stay sharded; two small
                           all-reduces per chunk

Parameters are DTensors, for FSDP, checkpoints and the view of a model by names. Activations are
plain tensors, each rank's own: for small layers, DTensor's dispatch takes more of the host's time
than the computation.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from inner.model.block_params import BlockParam, block_params
from inner.model.experts import Mixture
from inner.model.loss import ChunkedCrossEntropy, VocabShard
from inner.model.norms import Norm, apply_norm
from inner.model.router import Router
from inner.model.sizes import ModelSizes
from inner.model.transformer import Attention, Block, Head, Transformer
from inner.parallel.expert import PositionShare
from inner.parallel.tensor_stream import TensorStream

STREAM = "tensor_stream"
"""Attribute of the modules that gather or sum the stream."""


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Shard every parameter over the 1-D `mesh`, and activations with them. Every rank must call
    it, before FSDP.
    """
    stream = TensorStream(
        mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), is_split=sequence_parallel
    )
    for layer in model.blocks():
        _split_block(layer, model.sizes, mesh, stream)
    if model.embed is not None:
        _split(model.embed, mesh, Shard(0), _embed_here)
        setattr(model.embed, STREAM, stream)
    if model.position is not None:
        _split(model.position, mesh, Replicate(), _position_here)
        setattr(model.position, STREAM, stream)
    if model.norm is not None:
        _split(model.norm, mesh, Replicate(), _norm_here)
    if model.head is not None:
        _split_head(model.head, mesh, stream)


def _split_block(layer: Block, sizes: ModelSizes, mesh: DeviceMesh, stream: TensorStream) -> None:
    if sizes.num_kv_heads < mesh.size():
        # Each rank projects all key-value heads and reads the single head that its queries share.
        mine = mesh.get_local_rank() * sizes.num_kv_heads // mesh.size()
        layer.attention.kv_heads = slice(mine, mine + 1)
    if isinstance(layer.attention, Attention) and layer.attention.rule is not None:
        num_mine = sizes.num_heads // mesh.size()
        first = mesh.get_local_rank() * num_mine
        layer.attention.rule = layer.attention.rule.of_heads(slice(first, first + num_mine))
    for param in block_params(
        sizes, has_experts=isinstance(layer.ffn, Mixture), predicts=layer.joint is not None
    ):
        # A bias is split together with its module's weight, and experts by expert parallelism.
        if param.name.endswith(".weight") and not param.is_stacked:
            _split_module(layer.get_submodule(param.module), param, sizes, mesh, stream)
    readers: list[nn.Module] = [layer.attention]
    if isinstance(layer.ffn, Mixture):
        layer.ffn.share = PositionShare(stream, mesh.get_local_rank())
        readers += [] if layer.ffn.shared is None else [layer.ffn.shared]
    else:
        readers.append(layer.ffn)
    for reader in readers:
        # A single gather serves all projections of the same x.
        setattr(reader, STREAM, stream)
        reader.register_forward_pre_hook(_gather_first)


def _split_module(
    module: nn.Module, weight: BlockParam, sizes: ModelSizes, mesh: DeviceMesh, stream: TensorStream
) -> None:
    """Distribute a block's module over the mesh in the way that its weight is cut."""
    if isinstance(module, Router):
        # Each rank routes its own positions with the whole weight.
        whole = distribute_tensor(module.weight.data, mesh, [Replicate()], src_data_rank=None)
        module.weight = nn.Parameter(whole)
    elif not weight.is_matrix:
        _split(module, mesh, Replicate(), _norm_here)
    elif weight.is_input:
        is_whole = weight.is_on_all_ranks(sizes, mesh.size())
        _split(module, mesh, Replicate() if is_whole else Shard(0), _project_here)
    else:
        _split(module, mesh, Shard(1), _project_and_sum)
        setattr(module, STREAM, stream)


def _split(
    module: nn.Module, mesh: DeviceMesh, placement: Placement, forward: Callable[..., Tensor]
) -> None:
    """Distribute a module's parameters, and let it compute `forward(module, x)` with this rank's
    part of them.

    If ranks use a whole weight on different inputs, each has only a part of its gradient: see
    gradients.sum_over_tensor_ranks.
    """
    for name, param in list(module.named_parameters(recurse=False)):
        # The bias of a matrix whose columns are cut is added to the sum, which every rank has.
        is_added_after = placement == Shard(1) and param.ndim == 1
        # No values are sent, because parameters are on the meta device and initial values are the
        # same on every rank.
        placements = [Replicate() if is_added_after else placement]
        sharded = distribute_tensor(param.data, mesh, placements, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(sharded))
    # Use a method and not a partial per module, so that torch.compile sees that all blocks share
    # one graph.
    module.forward = MethodType(forward, module)


def _split_head(head: Head, mesh: DeviceMesh, stream: TensorStream) -> None:
    """Let each rank compute the logits of its rows of the vocabulary for all positions. Logits are
    never gathered.
    """
    assert isinstance(head.cross_entropy, ChunkedCrossEntropy)
    for name, param in list(head.named_parameters(recurse=False)):
        head.register_parameter(
            name, nn.Parameter(distribute_tensor(param.data, mesh, [Shard(0)], src_data_rank=None))
        )
    head.cross_entropy = partial(_sharded_cross_entropy, mesh, head.cross_entropy)
    setattr(head, STREAM, stream)
    head.register_forward_pre_hook(_gather_first)


def _gather_first(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x_BSD, *others = inputs
    return _stream_of(module).gather(x_BSD), *others


def _stream_of(module: Any) -> TensorStream:
    return getattr(module, STREAM)


def _project_here(module: nn.Linear, x_BSD: Tensor) -> Tensor:
    return F.linear(
        x_BSD, _local(module.weight), None if module.bias is None else _local(module.bias)
    )


def _project_and_sum(module: nn.Linear, x_BSH: Tensor) -> Tensor:
    sum_BSD = _stream_of(module).scatter(F.linear(x_BSH, _local(module.weight)))
    return sum_BSD if module.bias is None else sum_BSD + _local(module.bias)


def _norm_here(module: Norm, x_BSD: Tensor) -> Tensor:
    bias_D = getattr(module, "bias", None)
    return apply_norm(
        module, x_BSD, _local(module.weight), None if bias_D is None else _local(bias_D)
    )


def _position_here(module: nn.Embedding, positions_S: Tensor) -> Tensor:
    """Look up the vectors of the positions of this rank's part of the stream."""
    return F.embedding(_stream_of(module).part_of(positions_S), _local(module.weight))


def _embed_here(module: nn.Embedding, tokens_BS: Tensor) -> Tensor:
    """Look up the tokens of this rank's rows of the vocabulary. The sum over all ranks is the
    stream.

    DTensor's own lookup would compute the gradient of the whole table on every rank.
    """
    weight_VD = _local(module.weight)
    rows_BS = tokens_BS - _first_row(module.weight)
    is_elsewhere_BS = (rows_BS < 0) | (rows_BS >= weight_VD.shape[0])
    x_BSD = F.embedding(rows_BS.masked_fill(is_elsewhere_BS, 0), weight_VD)
    return _stream_of(module).scatter(x_BSD.masked_fill(is_elsewhere_BS[..., None], 0.0))


def _sharded_cross_entropy(
    mesh: DeviceMesh, whole: ChunkedCrossEntropy, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor
) -> Tensor:
    """Compute the same summed cross-entropy as `whole`, with a table whose rows are sharded over
    the ranks of `mesh`.
    """
    shard = VocabShard(mesh.get_group(), start=_first_row(weight_VD))
    return ChunkedCrossEntropy(whole.chunk_tokens, shard, whole.z_loss, whole.cap)(
        x_TD, _local(weight_VD), targets_T
    )


def _local(weight: Tensor) -> Tensor:
    """Return this rank's rows of a weight, or all of it if it is not sharded. Gradients flow
    back.
    """
    assert isinstance(weight, DTensor)
    return weight.to_local()


def _first_row(weight: Tensor) -> int:
    """Return the index of this rank's first row."""
    assert isinstance(weight, DTensor)
    return compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )[1][0]
