"""Bounds on the error of each decoded element, for the codecs that guarantee one."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from outer.codecs import build_codec
from outer.merges.mean import weighted_mean
from tests.outer.codec_values import (
    DENSE,
    SIZES,
    error_bound,
    finite_values,
    int4_steps,
    int8_steps,
    mixed_values,
    round_trip,
)

torch.set_num_threads(1)
Steps = Callable[[np.ndarray], np.ndarray]


def assert_within_bound(name: str, values: torch.Tensor) -> None:
    decoded = round_trip(name, values)
    error = np.abs(decoded.numpy().astype(np.float64) - values.numpy().astype(np.float64))
    excess = error - error_bound(name, values)
    assert decoded.dtype == torch.float32 and decoded.shape == values.shape
    assert (excess <= 0).all(), (
        f"{name}: element {excess.argmax()} of {values[excess.argmax()]} is off"
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", DENSE)
def test_every_element_is_within_the_bound(name: str, size: int) -> None:
    for seed in range(5):
        assert_within_bound(name, mixed_values(size, seed))


@pytest.mark.parametrize("name", DENSE)
@settings(max_examples=60, deadline=None)
@given(values=finite_values)
def test_any_finite_values_are_within_the_bound(name: str, values: torch.Tensor) -> None:
    assert_within_bound(name, values.clamp(-3.37e38, 3.37e38))


@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "e3m0"])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-6, 1.0, 1e6, 1e30])
def test_the_relative_error_does_not_depend_on_the_scale(name: str, scale: float) -> None:
    values = mixed_values(1000, 0).clamp(-1, 1) * scale
    error = (round_trip(name, values) - values).abs().max().item()
    assert (
        error
        <= scale * {"fp16": 2.0**-11, "int8": 0.51 / 127, "int4": 0.51 / 7, "e3m0": 0.2501}[name]
    )


@pytest.mark.parametrize("name", DENSE)
def test_denormals_stay_below_the_smallest_step(name: str) -> None:
    values = torch.linspace(-1.0, 1.0, 999, dtype=torch.float64).mul(2.0**-127).float()
    error = (round_trip(name, values).double() - values.double()).abs().max().item()
    assert error <= (0.0 if name == "fp32" else 2.0**-127)


@pytest.mark.parametrize("name", DENSE)
@settings(max_examples=60, deadline=None)
@given(values=finite_values)
def test_encoding_decoded_values_gives_the_same_values(name: str, values: torch.Tensor) -> None:
    once = round_trip(name, values)
    assert torch.equal(round_trip(name, once), once)


@pytest.mark.parametrize("name", DENSE)
def test_encoding_decoded_values_gives_the_same_bytes(name: str) -> None:
    codec = build_codec(name)
    for seed in range(20):
        payload = codec.encode(torch.randn(4097, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(codec.encode(codec.decode(payload, 4097)), payload)


@pytest.mark.parametrize(("name", "steps"), [("int8", int8_steps), ("int4", int4_steps)])
@pytest.mark.parametrize("num_islands", [1, 2, 8, 32])
def test_the_error_of_a_mean_does_not_grow_with_the_islands(
    name: str, steps: Steps, num_islands: int
) -> None:
    rng = np.random.default_rng(8)
    parts = [
        torch.from_numpy(rng.standard_normal(5000).astype(np.float32)) for _ in range(num_islands)
    ]
    weights = [1 / num_islands] * num_islands
    mean = weighted_mean([round_trip(name, part) for part in parts], weights)
    error = np.abs(
        round_trip(name, mean).numpy() - np.mean([part.numpy() for part in parts], axis=0)
    )
    one_encoding = 0.5 * max(steps(part.numpy()).max() for part in parts)
    # One encoding of the parts (their errors are averaged, not added) and one of the mean.
    assert error.max() <= 2.01 * one_encoding
