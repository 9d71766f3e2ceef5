"""The parameters that are counted before a model is built are those of the real model."""

from dataclasses import replace

import pytest
import torch

from inner.measure.param_specs import num_elements, param_specs
from inner.model.sizes import PRESETS, ModelSizes
from inner.model.transformer import Transformer

SIZES = {name: PRESETS[name] for name in ("1m", "15m", "1b", "8b")}
SIZES |= {
    "qk_norm": replace(PRESETS["1m"], qk_norm=True),
    "tied": replace(PRESETS["1m"], tie_embeddings=True),
    "qkv_bias": replace(PRESETS["1m"], qkv_bias=True),
    "heads of their own size": replace(PRESETS["1m"], qk_norm=True, own_head_dim=48),
    "no gqa": replace(PRESETS["1m"], num_kv_heads=PRESETS["1m"].num_heads),
    "one kv head": replace(PRESETS["1m"], num_kv_heads=1),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_specs_have_the_models_own_names_shapes_and_order(sizes: ModelSizes) -> None:
    with torch.device("meta"):
        model = Transformer(sizes, torch.arange(8))
    specs = param_specs(sizes)
    assert [(spec.name, spec.shape) for spec in specs] == [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    assert num_elements(specs) == sum(param.numel() for param in model.parameters())
