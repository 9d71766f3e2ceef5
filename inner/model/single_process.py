"""A model in one process, without a mesh, for evaluation and generation."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from inner.data.micro_batch import Cutter, num_targets
from inner.expert_names import router_bias_name
from inner.model.experts import mixtures
from inner.model.sizes import ModelSizes
from inner.model.transformer import Transformer
from inner.params import stack


def build_whole_model(
    sizes: ModelSizes, tensors: Mapping[str, Tensor], num_positions: int, device: str
) -> Transformer:
    """Build a model without gradients, for up to `num_positions`, from its full fp32 weights by
    full name.

    `tensors`: the parameters, with a matrix for each expert, and the biases of routers where they
    are not zero. Those of extra depths are left out.
    """
    of_depths = tuple(f"layers.{layer}." for layer in sizes.predicting_layers)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(of_depths)}
    sizes = replace(sizes, predict=None)
    with torch.device("meta"):
        model = Transformer(sizes, torch.arange(num_positions, device="cpu"))
    for name, buffer in list(model.named_buffers(recurse=False)):
        setattr(model, name, torch.empty_like(buffer, device="cpu"))
    for mixture in mixtures([model]):
        mixture.router.bias = torch.empty_like(mixture.router.bias, device="cpu")
    model.fill_tables()
    zeros = {router_bias_name(mixture.layer): mixture.router.bias for mixture in mixtures([model])}
    # With assign=True the model shares the tensors' memory on the CPU.
    model.load_state_dict(zeros | stack(tensors), assign=True)
    return model.requires_grad_(False).to(device)


@torch.no_grad()
def summed_loss(
    model: Transformer, windows: Iterable[Tensor], seq_len: int, eos_id: int | None
) -> tuple[float, int]:
    """Return the summed loss in nats and the number of targets over int64 windows (B, seq_len + 1);
    `eos_id` ends a document.
    """
    cut = Cutter(torch.arange(seq_len), seq_len, eos_id, model.rope_2SE.device)
    loss = 0.0
    tokens = 0
    for window in windows:
        batch = cut(window)
        loss += model(batch.tokens_BS, targets_BS=batch.targets_BS, packing=batch.packing).item()
        tokens += num_targets(window)
    return loss, tokens
