"""What one island trains and how. No torch here: a config error must come before torch is imported."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A part of the config: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Section):
    """A Llama-style decoder. `preset` gives the sizes; any size named beside it wins over the preset's."""

    preset: str | None = None
    dim: int | None = Field(default=None, ge=8)
    num_layers: int | None = Field(default=None, ge=1)
    num_heads: int | None = Field(default=None, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    ffn_dim: int | None = Field(default=None, ge=8)
    vocab_size: int | None = Field(default=None, ge=2)
    """None: the tokenizer's size."""
    rope_theta: float | None = Field(default=None, gt=0)
    """None: the preset's, or 10000."""
    norm_eps: float = Field(default=1e-5, gt=0)
    qk_norm: bool = False
    tie_embeddings: bool | None = None


class DataConfig(Section):
    """Where text comes from and how it is cut into sequences."""

    source: Literal["python-stdlib", "files", "huggingface"] = "python-stdlib"
    paths: list[str] = []
    """For `files`: text, .jsonl or .parquet files, folders or glob patterns."""
    dataset: str | None = None
    """For `huggingface`: the dataset's name, for example `allenai/c4`."""
    dataset_config: str | None = None
    split: str = "train"
    text_field: str = "text"
    tokenizer: str = "bytes"
    """`bytes`, the path of a tokenizer.json, or a tokenizer's name on the Hugging Face hub."""
    seq_len: int = Field(default=256, ge=8)
    heldout_fraction: float = Field(default=0.02, gt=0, lt=1)
    max_tokens: int | None = Field(default=None, ge=1)
    """Stop reading the training text after so many tokens."""


class OptimizerConfig(Section):
    """The inner optimizer, its schedule in inner steps, and what guards it."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(default=4e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip_norm: float | None = Field(default=1.0, gt=0)
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: int = Field(default=100, ge=0)
    decay_steps: int = Field(default=0, ge=0)
    """For `wsd`: the steps of the final linear decay."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    tokens_per_step: int = Field(default=16384, ge=1)
    """Tokens of one inner step in one island, over all of its ranks and micro-batches."""
    max_skipped_steps: int = Field(default=10, ge=0)
    """Non-finite steps in a row that are skipped before the island stops."""


class EvaluateConfig(Section):
    """Held-out loss on the global params."""

    every_rounds: int = Field(default=1, ge=1)
    tokens: int = Field(default=65536, ge=1)


class MeshConfig(Section):
    """Degrees of the island's mesh. Their product must be its number of ranks; dp_shard -1 takes the rest."""

    dp_replicate: int = Field(default=1, ge=1)
    dp_shard: int = Field(default=-1, ge=-1)

    @model_validator(mode="after")
    def _shard_is_a_degree(self) -> "MeshConfig":
        if self.dp_shard == 0:
            raise ValueError("dp_shard must be a positive degree or -1 (all remaining ranks)")
        return self
