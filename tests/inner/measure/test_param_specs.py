"""The parameters that are counted before a model is built are those of the real model."""

import math
from dataclasses import replace

import pytest
import torch

from inner.expert_names import find_expert
from inner.measure.param_specs import num_active, num_elements, param_specs
from inner.model.sizes import PRESETS, ModelSizes
from inner.model.transformer import Transformer
from inner.params import unstack
from tests.parity.meshes import LATENT, MIXTURE

SIZES = {name: PRESETS[name] for name in ("1m", "15m", "1b", "8b")}
SIZES |= {
    "qk_norm": replace(PRESETS["1m"], qk_norm=True),
    "tied": replace(PRESETS["1m"], tie_embeddings=True),
    "qkv_bias": replace(PRESETS["1m"], qkv_bias=True),
    "heads of their own size": replace(PRESETS["1m"], qk_norm=True, own_head_dim=48),
    "no gqa": replace(PRESETS["1m"], num_kv_heads=PRESETS["1m"].num_heads),
    "one kv head": replace(PRESETS["1m"], num_kv_heads=1),
    "latent attention": replace(LATENT, experts=None),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_specs_have_the_models_own_names_shapes_and_order(sizes: ModelSizes) -> None:
    with torch.device("meta"):
        model = Transformer(sizes, torch.arange(8))
    specs = param_specs(sizes)
    assert [(spec.name, spec.shape) for spec in specs] == [
        (n, tuple(p.shape)) for n, p in model.named_parameters()
    ]
    assert num_elements(specs) == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("sizes", [MIXTURE, LATENT], ids=["experts", "latent attention"])
def test_each_expert_s_matrix_has_a_name_of_its_own(sizes: ModelSizes) -> None:
    with torch.device("meta"):
        model = Transformer(sizes, torch.arange(8))
    tensors = unstack(dict(model.named_parameters()))
    assert [(spec.name, spec.shape) for spec in param_specs(sizes)] == [
        (n, tuple(p.shape)) for n, p in tensors.items()
    ]


@pytest.mark.parametrize("sizes", [MIXTURE, LATENT], ids=["experts", "latent attention"])
def test_a_token_uses_all_parameters_but_those_of_the_experts_that_were_not_chosen(
    sizes: ModelSizes,
) -> None:
    assert sizes.experts is not None
    stacks = [math.prod(spec.shape) for spec in param_specs(sizes) if find_expert(spec.name)]
    unused = 1 - sizes.experts.per_token / sizes.experts.number
    assert num_active(sizes) == num_elements(param_specs(sizes)) - round(unused * sum(stacks))
