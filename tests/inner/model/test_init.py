"""Initial values of single parameters. tests/parity tests that meshes agree."""

import hashlib
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from inner.model.init import initial_values, initialise, normal_table
from inner.param_spec import ParamSlice, ParamSpec
from inner.params import LocalParams
from tests.inner.small import SIZES, build_model

ROOT = Path(__file__).parents[3]
SHAPE = (200, 100)
DIGEST = """
import hashlib, numpy
from tests.inner.model.test_init import values
print(hashlib.sha256(values("layers.3.ffn.up_proj.weight").numpy().tobytes()).hexdigest())
"""


def values(
    name: str,
    seed: int = 0,
    num_layers: int = 8,
    rows: tuple[int, int] = (0, 200),
    cols: tuple[int, int] = (0, 100),
) -> torch.Tensor:
    return initial_values(ParamSpec(name, SHAPE), ParamSlice(name, rows, cols), seed, num_layers)


def test_values_depend_on_seed_and_name_alone() -> None:
    name = "layers.3.ffn.up_proj.weight"
    assert torch.equal(values(name), values(name, num_layers=3))
    assert not torch.equal(values(name), values(name, seed=1))
    assert not torch.equal(values(name), values(name.replace("3", "4")))


@pytest.mark.parametrize("rows", [(0, 1), (7, 150), (199, 200), (50, 50)])
@pytest.mark.parametrize("cols", [(0, 100), (13, 77)])
def test_a_slice_is_that_of_the_whole(rows: tuple[int, int], cols: tuple[int, int]) -> None:
    whole = values("head.weight")
    assert torch.equal(
        values("head.weight", rows=rows, cols=cols), whole[slice(*rows), slice(*cols)]
    )


def test_a_large_parameter_is_drawn_in_blocks_with_the_same_result() -> None:
    spec = ParamSpec("embed.weight", (9000, 100))
    last = ParamSlice(spec.name, (8990, 9000), (0, 100))
    whole = initial_values(spec, ParamSlice(spec.name, (0, 9000), (0, 100)), 0, 8)
    assert torch.equal(initial_values(spec, last, 0, 8), whole[8990:])
    assert len(torch.unique(whole[:, :4], dim=0)) == 9000


def test_values_are_the_same_on_every_machine() -> None:
    whole = hashlib.sha256(values("layers.3.ffn.up_proj.weight").numpy().tobytes()).hexdigest()
    assert whole[:16] == "0eafef743ce8ed57"


def test_values_are_the_same_without_the_processor_s_vector_units() -> None:
    features = " ".join(np._core._multiarray_umath.__cpu_dispatch__)  # pyright: ignore[reportAttributeAccessIssue]
    plain = {"ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": features}
    command = [sys.executable, "-W", "ignore", "-c", DIGEST]
    child = subprocess.run(
        command, cwd=ROOT, env=os.environ | plain, capture_output=True, text=True, timeout=180
    )
    here = hashlib.sha256(values("layers.3.ffn.up_proj.weight").numpy().tobytes()).hexdigest()
    assert child.stdout.strip() == here, child.stderr


def test_the_table_is_that_of_the_normal_distribution() -> None:
    exact = [NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(65536)]
    assert np.abs(normal_table() - np.array(exact)).max() < 1e-6


def test_values_have_the_moments_of_a_normal_distribution() -> None:
    spec = ParamSpec("embed.weight", (1000, 1000))
    drawn = initial_values(spec, ParamSlice(spec.name, (0, 1000), (0, 1000)), 0, 8).double() / 0.02
    moments = [(drawn**power).mean().item() for power in (1, 2, 3, 4)]
    # Four standard errors of a million draws.
    assert all(
        math.isclose(got, expected, abs_tol=4e-3 * math.sqrt(spread))
        for got, expected, spread in zip(moments, (0, 1, 0, 3), (1, 2, 15, 96), strict=True)
    )
    neighbours = (
        (drawn[:, 1:] * drawn[:, :-1]).mean().item(),
        (drawn[1:] * drawn[:-1]).mean().item(),
    )
    assert max(map(abs, neighbours)) < 4e-3


def test_a_dry_run_draws_nothing() -> None:
    with FakeTensorMode():
        drawn = initial_values(
            ParamSpec("embed.weight", (1 << 40, 1 << 20)),
            ParamSlice("e", (0, 1 << 40), (0, 1 << 20)),
            0,
            8,
        )
    assert drawn.shape == (1 << 40, 1 << 20)


def test_global_random_state_is_neither_read_nor_changed() -> None:
    before = torch.random.get_rng_state()
    first = values("embed.weight")
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(values("embed.weight"), first)


def test_residual_outputs_shrink_with_depth() -> None:
    for name in ("layers.0.attention.out_proj.weight", "layers.0.ffn.down_proj.weight"):
        assert math.isclose(values(name).std(), 0.02 / 4, rel_tol=0.03)
    assert math.isclose(values("head.weight").std(), 0.02, rel_tol=0.03)


def test_all_norms_are_ones_and_tables_are_filled() -> None:
    expected = build_model().rope_2SE.clone()
    model = build_model()
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(torch.nan)
    initialise(LocalParams(model, [model]), [model], seed=0)
    assert torch.equal(model.rope_2SE, expected)
    for name, param in model.named_parameters():
        assert torch.isfinite(param).all(), name
        assert bool((param == 1).all()) == name.endswith("norm.weight"), name


def test_biases_begin_at_zero() -> None:
    model = build_model(replace(SIZES, qk_norm=False, qkv_bias=True))
    biases = [param for name, param in model.named_parameters() if name.endswith(".bias")]
    assert len(biases) == 3 * SIZES.num_layers and not any(param.any() for param in biases)
