"""torchtitan's debug models, smaller, as a registry of configs: for one core, without files of its
repository.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.deepseek_v3 import config_registry as deepseek
from torchtitan.models.llama3 import config_registry as llama
from torchtitan.models.qwen3 import config_registry as qwen
from torchtitan.trainer import Trainer

from diloco.titan.trainer import with_islands

VOCAB = 256
SEQ_LEN = 32
SEQUENCES = 4
"""Of a step of an island."""


class NoTokenizer(BaseTokenizer):
    """The trainer builds a tokenizer, and the text here is made of random tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class RandomLoader(BaseDataLoader):
    """Sequences by their numbers, of which a rank of `dp_world_size` reads every
    `dp_world_size`-th.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab_size: int = VOCAB
        infinite: bool = True
        """Set by torchtitan's validator."""
        num_batches: int | None = None
        """The text ends after so many."""
        killed_at: int | None = None
        """The process is killed when this batch is asked for, counted from 0."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        self.vocab_size, self.seq_len, self.batch = config.vocab_size, seq_len, local_batch_size
        self.rank, self.world, self.next = dp_rank, dp_world_size, 0
        self.config = config

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while self.next // self.batch != self.config.num_batches:
            if self.next // self.batch == self.config.killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            numbers = [self.rank + (self.next + k) * self.world for k in range(self.batch)]
            self.next += self.batch
            text = torch.stack([self.sequence(number) for number in numbers])
            yield {"input": text[:, :-1].contiguous()}, text[:, 1:].contiguous()

    def sequence(self, number: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(number)
        start = torch.randint(self.vocab_size, (1,), generator=made)
        return (
            start + torch.arange(self.seq_len + 1) * torch.randint(1, 4, (1,), generator=made)
        ) % self.vocab_size

    def state_dict(self) -> dict[str, Any]:
        return {f"next_{self.rank}": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict[f"next_{self.rank}"]


def shrink(config: Trainer.Config, num_layers: int = 2) -> Trainer.Config:
    """A config of a debug model with fewer layers and tokens, for SDPA and random text."""
    model = config.model_spec.model
    model.layers = model.layers[:num_layers]
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCAB
    config.loss.loss_fn.global_vocab_size = VOCAB
    for _, _, parent, name in list(model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    config.tokenizer = NoTokenizer.Config()
    config.dataloader = RandomLoader.Config()
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.training.seq_len = SEQ_LEN
    config.training.local_batch_size = config.training.global_batch_size = SEQUENCES
    config.training.steps = 12
    config.optimizer.implementation = "foreach"
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=6)
    config.checkpoint = CheckpointManager.Config(interval=3, last_save_model_only=False)
    config.validator = Validator.Config(steps=1, freq=2, dataloader=RandomLoader.Config())
    config.activation_checkpoint = None
    config.debug.seed = 1
    config.debug.enable_structured_logging = False
    config.parallelism.spmd_backend = os.environ.get("SPMD", "spmd_types")
    config.hf_assets_path = "."
    return config


def plain_llama3() -> Trainer.Config:
    return shrink(llama.llama3_debugmodel())


def llama3() -> Trainer.Config:
    return with_islands(plain_llama3())


def llama3_of_four() -> Trainer.Config:
    return with_islands(shrink(llama.llama3_debugmodel(), num_layers=4))


def llama3_recomputed() -> Trainer.Config:
    config = llama3()
    config.activation_checkpoint = FullAC.Config()
    return config


def qwen3_moe() -> Trainer.Config:
    return with_islands(shrink(qwen.qwen3_moe_debug()))


def qwen3_tied() -> Trainer.Config:
    return with_islands(shrink(qwen.qwen3_debugmodel()))


def deepseek_v3() -> Trainer.Config:
    return with_islands(shrink(deepseek.deepseek_v3_debugmodel()))
