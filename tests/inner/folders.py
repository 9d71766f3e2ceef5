"""Small models in Hugging Face's layout."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inner.huggingface.save import Dtype, Export, save_model
from inner.model.sizes import ModelSizes
from inner.model.transformer import Transformer
from inner.params import unstack
from tests.inner.small import SIZES, build_model

BYTE_SIZES = replace(SIZES, vocab_size=260)


def spread_model(sizes: ModelSizes = BYTE_SIZES, seed: int = 3, seq_len: int = 32) -> Transformer:
    """A model in which every weight matters: norms differ from one and logits differ from each
    other.
    """
    model = build_model(sizes, seed, seq_len).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.add_(0.1 * torch.randn(param.shape, generator=generator))
    return model


def tensors_of(model: Transformer) -> dict[str, Tensor]:
    return unstack({name: param.detach() for name, param in model.named_parameters()})


def write_folder(out: Path, model: Transformer, dtype: Dtype = "float32", **export: Any) -> Path:
    """An export of the model, with the byte tokenizer."""
    wanted = Export(model.sizes, model.rope_2SE.shape[1], "bytes", dtype)
    save_model(tensors_of(model), replace(wanted, **export), out)
    return out


def change_config(folder: Path, **values: Any) -> None:
    """Set keys of the folder's config.json. The value `...` removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
