"""Buffers beside parameters: what the outer loop reads and writes of them."""

import torch
from torch import nn

from inner.measure.param_specs import averaged_specs, num_elements, param_specs
from inner.model.buffers import Buffer, saved_buffers, with_buffers
from inner.model.sizes import PRESETS
from inner.model.transformer import Transformer
from inner.params import LocalParams


class Norm(nn.Module):
    saved_buffers = ("mean",)
    mean: torch.Tensor
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("mean", torch.zeros(2, 2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def test_buffers_come_after_parameters_and_are_written_in_place() -> None:
    model = Norm()
    buffers = [*saved_buffers([model]), Buffer("steps", model, "steps", "donor_buffer")]
    view = with_buffers(LocalParams(model, [model]), [buffer.spec for buffer in buffers], buffers)
    assert [spec.name for spec in view.specs] == ["weight", "mean@buffer", "steps@donor_buffer"]
    assert [held.shape for held in view.slices] == [(2, 3), (2, 2), (1, 1)]
    held = model.mean
    view.write_all(
        {0: torch.full((2, 3), 5.0), 1: torch.full((2, 2), 7.0), 2: torch.full((1, 1), 9.0)}
    )
    assert (
        model.mean is held
        and model.mean.eq(7).all()
        and model.weight.eq(5).all()
        and model.steps.item() == 9
    )
    assert {
        index: values.unique().tolist() for index, values in view.read_all([0, 1, 2]).items()
    } == {
        0: [5.0],
        1: [7.0],
        2: [9.0],
    }


def test_a_buffer_that_code_has_replaced_is_read_and_written_where_the_model_has_it() -> None:
    model = Norm()
    (buffer,) = saved_buffers([model])
    view = with_buffers(LocalParams(model, [model]), [buffer.spec], [buffer])
    model.mean = model.mean + 1
    assert view.read_all([1])[1].eq(1).all()
    view.write_all({1: torch.full((2, 2), 3.0)})
    assert model.mean.eq(3).all()


def test_a_model_without_buffers_has_the_view_of_its_parameters() -> None:
    model = nn.Linear(2, 3)
    params = LocalParams(model, [model])
    assert with_buffers(params, [], []) is params


def test_what_is_averaged_of_a_mixture_is_counted_without_building_it() -> None:
    sizes = PRESETS["1m-experts"]
    with torch.device("meta"):
        model = Transformer(sizes, torch.arange(8))
    biases = tuple(buffer.spec for buffer in saved_buffers([model]))
    assert averaged_specs(sizes) == (*param_specs(sizes), *biases) and len(biases) > 0
    assert num_elements(averaged_specs(sizes)) == num_elements(param_specs(sizes))
    dense = next(size for size in PRESETS.values() if size.experts is None)
    assert averaged_specs(dense) == param_specs(dense)
