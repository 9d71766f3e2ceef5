"""Slices are read and written in place, also uneven and empty ones. tests/parity tests their
union.
"""

from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from inner.mesh import Degrees
from inner.param_spec import ParamSlice
from inner.params import LocalParams
from outer.space.holdings import Holdings, RankSlices, check_coverage, pack_slices
from outer.space.layout import Space, matrix_shape
from tests.harness import run_ranks
from tests.inner.small import SIZES, batch, build_trainer, share, whole_model


def params_on_a_rank(rank: int, degrees: Degrees) -> None:
    """Written values are read back bit for bit, in place, by both the reader and the model."""
    params = build_trainer(degrees, micro_batch=1).params
    views = [params.read(index) for index in range(len(params.slices))]
    for index, held in enumerate(params.slices):
        values = torch.randn(held.shape, generator=torch.Generator().manual_seed(index)) * 1e-30
        params.write(index, values)
        assert torch.equal(params.read(index), values)
        assert params.read(index).data_ptr() == views[index].data_ptr()
        assert not params.read(index).requires_grad
        live = params.live(index)
        assert live is not None and live.data_ptr() == views[index].data_ptr()
    with pytest.raises(AssertionError, match=params.slices[0].name):
        params.write(0, torch.zeros(1, 1))


# Four ranks: the 8 elements of a head's norm and the 61 rows of the vocabulary are cut unevenly or
# padded.
@pytest.mark.parametrize(
    "degrees",
    [Degrees(), Degrees(dp_shard=3), Degrees(dp_replicate=2, dp_shard=2), Degrees(pp=2, tp=2)],
    ids=str,
)
def test_written_slices_are_read_back_in_place(degrees: Degrees) -> None:
    run_ranks(params_on_a_rank, degrees.num_ranks, degrees)


def more_ranks_than_rows_on_a_rank(rank: int, degrees: Degrees) -> tuple[int, list[float | None]]:
    sizes = replace(SIZES, dim=8, num_heads=4, num_kv_heads=1)
    trainer = build_trainer(degrees, sizes=sizes, micro_batch=2)
    _, holders = whole_model(trainer.params)
    assert all(bool((count == 1).all()) for count in holders.values())
    return len(trainer.params.slices), [
        trainer.step(share(trainer, batch(step))).loss for step in range(5)
    ]


def test_a_rank_may_hold_nothing_of_a_parameter() -> None:
    _, expected = run_ranks(more_ranks_than_rows_on_a_rank, 1, Degrees())[0]
    found = run_ranks(more_ranks_than_rows_on_a_rank, 3, Degrees(dp_shard=3))
    # A head has 2 elements: the third rank holds none of q_norm, k_norm, k_proj and v_proj.
    most = found[0][0]
    assert [count for count, _ in found] == [most, most, most - 4 * SIZES.num_layers]
    assert all(losses == pytest.approx(expected, rel=1e-5) for _, losses in found)


def test_a_number_and_a_transposed_matrix_are_read_and_written() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())

    model = Odd()
    params = LocalParams(model, [model])
    assert [held.shape for held in params.slices] == [(1, 1), (3, 2)]
    assert params.read(1).tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert params.live(1) is None, "it cannot be written as a flat vector"
    for index, held in enumerate(params.slices):
        params.write(index, torch.full(held.shape, 7.0))
    assert model.scale.item() == 7.0 and bool((model.turned == 7.0).all())


def test_a_view_of_tensors_has_the_names_of_the_whole_and_the_slices_of_this_rank() -> None:
    shapes = {"a": (2, 3), "b": (4,)}
    params = LocalParams.of_tensors(shapes, {"b": [nn.Parameter(torch.ones(4))]})
    assert [(spec.name, spec.shape) for spec in params.specs] == list(shapes.items())
    assert params.slices == [ParamSlice("b", (0, 4), (0, 1))]


PLACEMENTS = [
    (Shard(0), Shard(1)),
    (Shard(1), Shard(2)),
    (Shard(1), Shard(1)),
    (Shard(2), Replicate()),
    (Replicate(), Shard(1)),
]
STRIDED = [
    (_StridedShard(0, split_factor=2), Shard(0)),
    (_StridedShard(1, split_factor=2), Shard(1)),
    (_StridedShard(0, split_factor=2), Replicate()),
    (_StridedShard(2, split_factor=3), Shard(1)),
]
EVEN = (4, 8, 12)
SHARDED = [
    *product([EVEN, (3, 5, 7), (1, 8, 2), (2, 3, 4, 5)], PLACEMENTS),
    *product([EVEN], STRIDED),
]
"""torch distributes by strided shards only if all of them are equally large."""


def sharded_on_a_rank(rank: int) -> None:
    """The slices of each placement hold the right values, cover the parameter once, and are written
    in place.
    """
    mesh = init_device_mesh("cpu", (2, 2))
    for shape, places in SHARDED:
        whole = torch.arange(float(prod(shape))).view(shape)
        tensor = nn.Parameter(distribute_tensor(whole, mesh, places))
        params = LocalParams.of_tensors({"w": shape}, {"w": [tensor]})
        matrix = whole.view(matrix_shape(shape))
        for index, held in enumerate(params.slices):
            assert torch.equal(params.read(index), matrix[slice(*held.rows), slice(*held.cols)]), (
                shape,
                places,
            )
            params.write(index, -params.read(index))
            live = params.live(index)
            assert live is None or torch.equal(live, params.read(index))
        assert torch.equal(tensor.full_tensor(), -whole), (shape, places)
        space = Space(params.specs, whole.numel())
        packed: list[RankSlices] = [pack_slices([])] * 4
        dist.all_gather_object(packed, pack_slices(params.slices))
        check_coverage(space, Holdings(space, packed))


def test_shards_of_any_dimension_are_read_written_and_cover_the_parameter() -> None:
    run_ranks(sharded_on_a_rank, 4)
