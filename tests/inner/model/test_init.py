"""Initial values of single parameters. test_parity tests that meshes agree."""

import math
from dataclasses import replace

import torch

from inner.model.init import initial_values, initialise
from inner.param_spec import ParamSpec
from inner.params import LocalParams
from tests.inner.small import SIZES, build_model


def values(name: str, seed: int = 0, num_layers: int = 8) -> torch.Tensor:
    return initial_values(ParamSpec(name, (200, 100)), seed, num_layers)


def test_values_depend_on_seed_and_name_alone() -> None:
    name = "layers.3.ffn.up_proj.weight"
    assert torch.equal(values(name), values(name, num_layers=3))
    assert not torch.equal(values(name), values(name, seed=1))
    assert not torch.equal(values(name), values(name.replace("3", "4")))


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
