"""A mesh of one rank computes with copies of its weights; with FSDP over that rank the bits would
be the same.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from inner.data.micro_batch import Cutter
from inner.mesh import Degrees, IslandMesh
from inner.model.sizes import ModelSizes
from inner.parallel.one_stage import OneStage
from inner.parallel.recompute import apply_recompute
from inner.parallel.weights.compute_copies import ComputeCopies
from inner.parallel.weights.fsdp import apply_fsdp
from inner.params import local_tensor
from tests.harness import run_ranks
from tests.inner.small import SEQ_LEN, SIZES, batch, build_model, build_trainer, share

CPU = torch.device("cpu")
TIED = replace(SIZES, tie_embeddings=True)


@dataclass
class Backward:
    loss: Tensor
    gradients: dict[str, Tensor]


def backward(_: int, sizes: ModelSizes, dtype: torch.dtype, is_wrapped: bool) -> Backward:
    """Loss and gradients of two micro-batches, with weights under FSDP over one rank or as they
    are.
    """
    model = build_model(sizes, seq_len=SEQ_LEN)
    apply_recompute(model, "full")
    if is_wrapped:
        apply_fsdp(model, IslandMesh(Degrees(), "cpu").fsdp, dtype, reshard=True)
    assert isinstance(model, FSDPModule) == is_wrapped
    runner = OneStage(model, CPU, ComputeCopies([model], dtype), reduces_each=False)
    cutter = Cutter(torch.arange(SEQ_LEN), SEQ_LEN, None)
    loss = runner.backward([cutter(window) for window in batch(0).split(6)], torch.tensor(0.01))
    grads = {name: param.grad for name, param in model.named_parameters()}
    return Backward(
        loss, {name: local_tensor(grad).clone() for name, grad in grads.items() if grad is not None}
    )


@pytest.mark.parametrize("sizes", [SIZES, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_the_bits_of_fsdp_over_one_rank(
    sizes: ModelSizes, dtype: torch.dtype
) -> None:
    wrapped, plain = (
        run_ranks(backward, 1, sizes, dtype, is_wrapped)[0] for is_wrapped in (True, False)
    )
    assert plain.loss.equal(wrapped.loss)
    assert plain.gradients.keys() == wrapped.gradients.keys()
    for name, values in wrapped.gradients.items():
        assert plain.gradients[name].dtype == torch.float32
        assert plain.gradients[name].equal(values), name


def kinds_on_a_rank(_: int, degrees: Degrees) -> list[bool]:
    trainer = build_trainer(degrees, compute_dtype="bfloat16")
    before = [id(param) for stage in trainer.model_parts for param in stage.parameters()]
    trainer.step(share(trainer, batch(0)))
    after = [id(param) for stage in trainer.model_parts for param in stage.parameters()]
    assert before == after, "outside a step the parameters are the masters"
    return [
        isinstance(module, FSDPModule)
        for stage in trainer.model_parts
        for module in stage.modules()
    ]


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(tp=2), Degrees(pp=2)], ids=str)
def test_weights_that_one_rank_has_alone_are_not_wrapped(degrees: Degrees) -> None:
    assert not any(any(kinds) for kinds in run_ranks(kinds_on_a_rank, degrees.num_ranks, degrees))


@pytest.mark.parametrize("degrees", [Degrees(dp_replicate=2), Degrees(cp=2)], ids=str)
def test_weights_that_replicas_hold_whole_are_not_wrapped(degrees: Degrees) -> None:
    assert not any(any(kinds) for kinds in run_ranks(kinds_on_a_rank, degrees.num_ranks, degrees))


def test_weights_that_ranks_share_are_wrapped() -> None:
    assert all(any(kinds) for kinds in run_ranks(kinds_on_a_rank, 2, Degrees(dp_shard=2)))
