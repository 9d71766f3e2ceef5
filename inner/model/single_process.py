"""A whole model in one process, from whole tensors: what evaluates and generates, without a mesh."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from inner.model import Transformer
from inner.params import ParamSpec
from inner.presets import ModelSizes
from inner.windows import Cutter, num_targets


def specs_of(sizes: ModelSizes) -> list[ParamSpec]:
    """Every parameter's name and shape, in the model's own order."""
    with torch.device("meta"):
        model = Transformer(sizes, torch.arange(1))
    return [ParamSpec(name, tuple(param.shape)) for name, param in model.named_parameters()]


def build_model(sizes: ModelSizes, tensors: Mapping[str, Tensor], num_positions: int, device: str) -> Transformer:
    """The model with these weights, without gradients, for sequences up to `num_positions`.

    `tensors`: whole and fp32, by full name.
    """
    with torch.device("meta"):
        model = Transformer(sizes, torch.arange(num_positions, device="cpu"))
    # Assigned: on the CPU the model shares the tensors' memory.
    model.load_state_dict(dict(tensors), assign=True)
    model.rope_2SP = torch.empty_like(model.rope_2SP, device="cpu")
    model.fill_tables()
    return model.requires_grad_(False).to(device)


@torch.no_grad()
def summed_loss(model: Transformer, windows: Iterable[Tensor], seq_len: int, eos_id: int | None) -> tuple[float, int]:
    """(loss in nats summed, targets) over windows (B, seq_len + 1), int64; `eos_id`: attention ends at documents."""
    cut = Cutter(torch.arange(seq_len), seq_len, eos_id)
    device = model.rope_2SP.device
    loss, tokens = 0.0, 0
    for window in windows:
        tokens_BS, targets_BS, documents_BS = cut(window.to(device))
        loss += model(tokens_BS, targets_BS=targets_BS, documents_BS=documents_BS).item()
        tokens += num_targets(window)
    return loss, tokens
