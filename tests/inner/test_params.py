"""Slices are read and written in place, also uneven and empty ones. tests/parity tests their union."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from inner.mesh import Degrees
from inner.params import LocalParams
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


# Four ranks: the 8 elements of a head's norm and the 61 rows of the vocabulary are cut unevenly or padded.
@pytest.mark.parametrize(
    "degrees", [Degrees(), Degrees(dp_shard=3), Degrees(dp_replicate=2, dp_shard=2), Degrees(pp=2, tp=2)], ids=str
)
def test_written_slices_are_read_back_in_place(degrees: Degrees) -> None:
    run_ranks(params_on_a_rank, degrees.num_ranks, degrees)


def more_ranks_than_rows_on_a_rank(rank: int, degrees: Degrees) -> tuple[int, list[float | None]]:
    sizes = replace(SIZES, dim=8, num_heads=4, num_kv_heads=1)
    trainer = build_trainer(degrees, sizes=sizes, micro_batch=2)
    _, holders = whole_model(trainer.params)
    assert all(bool((count == 1).all()) for count in holders.values())
    return len(trainer.params.slices), [trainer.step(share(trainer, batch(step))).loss for step in range(5)]


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


def test_a_view_is_limited_to_the_named_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    params = LocalParams(model, [model], names={"1.weight", "0.bias"})
    assert [spec.name for spec in params.specs] == ["0.bias", "1.weight"] == [held.name for held in params.slices]
