"""The training loops that `scripts/bench/inner/inner.py` compares, each on one process.

The rivals are a Llama in plain torch.nn (plain_llama.py) and transformers' Llama. Their loop is the
one that a user would write: fp32 weights, autocast for bf16, fused AdamW, gradient clipping. Shape
suffixes are those of inner/model/transformer.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from inner.config import OptimizerConfig, ParallelConfig
from inner.mesh import Degrees, IslandMesh
from inner.model.init import initialise
from inner.model.sizes import ModelSizes
from inner.model.transformer import Transformer
from inner.params import LocalParams
from inner.trainer import COMPUTE_DTYPES, Trainer, TrainerSettings
from scripts.bench.plain_llama import CLIP_NORM, PlainLlama, plain_step

SEED = 7
NUM_BATCHES = 8
"""Number of batches, which are read in turn repeatedly."""
PIPELINE_MICRO_BATCH = 2
"""Sequences in a micro-batch of a pipeline, which needs many micro-batches."""
OPTIMIZER = OptimizerConfig(lr=3e-4, warmup_steps=0, schedule="constant", clip_norm=CLIP_NORM)
HEAD_DIM = 64


@dataclass(frozen=True)
class ModelCase:
    """A model and the work of one process in one step."""

    dim: int
    num_layers: int
    vocab_size: int
    dtype: str
    seq_len: int
    sequences: int
    """Sequences in a micro-batch of one process."""
    micro_batches: int
    """Micro-batches in a step of a single process. A mesh reads this number for each rank."""
    device: str

    @property
    def tokens(self) -> int:
        """Tokens in a step of a single process."""
        return self.sequences * self.micro_batches * self.seq_len

    @cached_property
    def sizes(self) -> ModelSizes:
        heads = self.dim // HEAD_DIM
        return ModelSizes(
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=heads,
            num_kv_heads=heads // 2,
            ffn_dim=3 * self.dim,
            vocab_size=self.vocab_size,
        )

    def windows(self, share: int, number: int) -> Tensor:
        """Return the sequences of process `share` in one step: (sequences, seq_len + 1)."""
        generator = torch.Generator().manual_seed(1000 * share + number)
        shape = self.micro_batches * self.sequences, self.seq_len + 1
        return torch.randint(0, self.vocab_size, shape, generator=generator)


@dataclass
class TrainingLoop:
    """A training loop on one process."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[int], float]
    """Makes one step on the batch of the given number, and returns the group's mean loss."""


def build_our_trainer(case: ModelCase, degrees: Degrees, parallel: dict[str, Any]) -> TrainingLoop:
    """Build inner's trainer on one rank of a mesh, with these settings of `island.parallel`. Every
    rank must call it, and then step.
    """
    # The ranks along tp, cp and pp together read as much as the same number of independent
    # processes. The ranks along tp and cp share each sequence, so one micro-batch takes no more of
    # a rank's memory than in an independent process.
    each = degrees.num_ranks // degrees.num_data_ranks
    micro_batch = (
        min(case.sequences, PIPELINE_MICRO_BATCH) if degrees.pp > 1 else case.sequences * each
    )
    settings = TrainerSettings(
        device=case.device,
        compute_dtype=case.dtype,
        micro_batch=micro_batch,
        seq_len=case.seq_len,
        seed=SEED,
        total_steps=10**6,
    )
    config = OPTIMIZER.model_copy(update={"tokens_per_step": case.tokens * degrees.num_ranks})
    config_of_mesh = ParallelConfig(compile=False, **parallel)
    trainer = Trainer(
        case.sizes, config, IslandMesh(degrees, case.device), config_of_mesh, settings
    )
    shares = range(trainer.data_rank * each, (trainer.data_rank + 1) * each)
    batches = [
        torch.cat([case.windows(share, number) for share in shares])
        for number in range(NUM_BATCHES)
    ]

    def step(number: int) -> float:
        result = trainer.step(list(batches[number % NUM_BATCHES].split(micro_batch)))
        assert result.loss is not None, "a step was skipped"
        return result.loss

    return TrainingLoop(trainer.model_parts[0], trainer.optimizers[0], step)


def build_plain_loop(case: ModelCase, model: nn.Module, share: int) -> TrainingLoop:
    """Build the loop around `model`, which maps tokens to logits."""
    return _build_loop(case, WithLoss(model).to(case.device), share)


def build_ddp_loop(case: ModelCase, share: int) -> TrainingLoop:
    """Build the plain loop around DistributedDataParallel. Every rank must call it, and then
    step.
    """
    return _build_loop(
        case, DistributedDataParallel(WithLoss(build_plain_llama(case)).to(case.device)), share
    )


def _build_loop(case: ModelCase, model: nn.Module, share: int) -> TrainingLoop:
    optimizer = plain_optimizer(model)
    batches = [case.windows(share, number).split(case.sequences) for number in range(NUM_BATCHES)]
    dtype = COMPUTE_DTYPES[case.dtype]

    def step(number: int) -> float:
        return plain_step(model, optimizer, batches[number % NUM_BATCHES], dtype)

    return TrainingLoop(model, optimizer, step)


def plain_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Build fused AdamW with the settings of our trainer for all parameters."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
        fused=True,
    )


class WithLoss(nn.Module):
    """Maps tokens and targets to the mean loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens_BS).flatten(0, 1), targets_BS.flatten())


def initial_weights(case: ModelCase) -> dict[str, Tensor]:
    """Return the initial weights of our trainer.

    With them, equal first losses show that all contestants train the same model.
    """
    model = Transformer(case.sizes, torch.arange(case.seq_len))
    initialise(LocalParams(model, [model]), [model], SEED)
    return model.state_dict()


def build_plain_llama(case: ModelCase) -> nn.Module:
    """Build the model in plain torch.nn, from tokens to logits."""
    model = PlainLlama(case.sizes, case.seq_len)
    model.load_state_dict(initial_weights(case))
    return model


def has_transformers() -> bool:
    return find_spec("transformers") is not None


def build_transformers_llama(case: ModelCase) -> nn.Module:
    """Build the model as transformers' LlamaForCausalLM, from tokens to logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = case.sizes
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.dim,
        intermediate_size=sizes.ffn_dim,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        max_position_embeddings=case.seq_len,
        rms_norm_eps=sizes.norm_eps,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    model.load_state_dict(
        {_transformers_name(name): value for name, value in initial_weights(case).items()}
    )
    return Logits(model)


class Logits(nn.Module):
    """Returns only the logits of a transformers model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.model(tokens_BS).logits


NAMES = {
    "embed.": "model.embed_tokens.",
    "layers.": "model.layers.",
    ".attention.out_proj.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".ffn.": ".mlp.",
    "head.": "lm_head.",
}


def _transformers_name(name: str) -> str:
    if name == "norm.weight":
        return "model.norm.weight"
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name
