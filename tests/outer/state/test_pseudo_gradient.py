"""The norm of a pseudo-gradient."""

import pytest
import torch

from outer.state.pseudo_gradient import STRETCH_ELEMENTS, sum_of_squares


@pytest.mark.parametrize("num_elements", [0, 1, STRETCH_ELEMENTS - 1, 3 * STRETCH_ELEMENTS + 5])
def test_the_sum_of_squares_is_that_of_double_precision_to_a_millionth(num_elements: int) -> None:
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
    assert sum_of_squares(values) == pytest.approx(float(values.double().square().sum()), rel=1e-6)
