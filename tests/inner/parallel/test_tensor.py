"""Memory that tensor and context parallelism need; parity is tested in tests/parity."""

from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from inner.config import ParallelConfig
from inner.mesh import Degrees
from inner.model.sizes import ModelSizes
from tests.harness import run_ranks
from tests.inner.small import OPTIMIZER, SEQUENCES, batch, build_trainer

# Activations, not weights, must be what is kept.
SIZES = ModelSizes(dim=64, num_layers=2, num_heads=8, num_kv_heads=4, ffn_dim=128, vocab_size=61)


class Kept:
    """Bytes that autograd keeps, each storage once, without parameters.

    A storage is told by its identity and not by its address: FSDP frees the memory of gathered
    parameters, whose address may then be that of an activation.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: dict[int, UntypedStorage] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = storage_of(tensor)
        self._seen.setdefault(storage._cdata, storage)
        return tensor

    @property
    def num_bytes(self) -> int:
        own = {storage_of(param)._cdata for param in self._model.parameters()}
        return sum(
            storage.nbytes() for identity, storage in self._seen.items() if identity not in own
        )


def storage_of(tensor: Tensor) -> UntypedStorage:
    """Storage of the tensor, or of the part that this rank holds. While it is referred to, its
    `_cdata` is its own.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def kept_on_a_rank(rank: int, degrees: Degrees, parallel: ParallelConfig) -> int:
    """Bytes kept by the blocks in one forward of all sequences."""
    trainer = build_trainer(degrees, SIZES, OPTIMIZER, parallel, micro_batch=SEQUENCES)
    kept = Kept(trainer.model_parts[0])
    tokens = trainer._cutter(batch(0).clamp(min=0)).tokens_BS
    blocks = list(trainer.model_parts[0].blocks())
    # The first forward also creates things that are made only once.
    with trainer._copies:
        trainer.model_parts[0](tokens, targets_BS=tokens)
    # Measured over the blocks alone, without embedding and loss.
    hooks: Any = saved_tensors_hooks(kept.pack, lambda tensor: tensor)
    blocks[0].register_forward_pre_hook(lambda *_: hooks.__enter__())
    blocks[-1].register_forward_hook(lambda *_: hooks.__exit__())
    with trainer._copies:
        trainer.model_parts[0](tokens, targets_BS=tokens)
    return kept.num_bytes


def kept(degrees: Degrees, **parallel: Any) -> int:
    return run_ranks(kept_on_a_rank, degrees.num_ranks, degrees, ParallelConfig(**parallel))[0]


@pytest.fixture(scope="module")
def of_one_process() -> int:
    return kept(Degrees())


def test_sequence_parallel_over_two_ranks_keeps_half(of_one_process: int) -> None:
    assert 0.45 < kept(Degrees(tp=2)) / of_one_process < 0.57


def test_without_sequence_parallel_every_rank_keeps_the_stream(of_one_process: int) -> None:
    assert 0.6 < kept(Degrees(tp=2), sequence_parallel=False) / of_one_process < 0.85


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_context_parallel_over_two_ranks_keeps_half(of_one_process: int, method: str) -> None:
    assert 0.45 < kept(Degrees(cp=2), context=method) / of_one_process < 0.57


class TableGradients(TorchDispatchMode):
    """Rows of each gradient of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding_dense_backward.default:
            self.rows.append(out.shape[0])
        return out


def table_gradients_on_a_rank(rank: int) -> list[int]:
    trainer = build_trainer(Degrees(tp=2), SIZES, micro_batch=SEQUENCES)
    with TableGradients() as seen:
        trainer.step([batch(0)])
    return seen.rows


def test_a_tensor_rank_computes_the_gradient_of_its_own_rows_of_the_embedding() -> None:
    assert run_ranks(table_gradients_on_a_rank, 2) == [[31], [30]]
