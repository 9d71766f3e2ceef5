"""Config of the model."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from inner.config.section import Section
from inner.import_path import Options, one_of

ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()),
    "dynamic": (("original_max_position_embeddings",), ()),
    "llama3": (("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (("original_max_position_embeddings",), ("attention_factor", "beta_fast", "beta_slow")),
}
"""Keys beside `rope_type` and `factor` that each type of RoPE scaling needs, and those that it also knows."""


class RopeScaling(Section):
    """How RoPE is scaled for sequences longer than in pre-training, in transformers' words. See inner/model/rope.py."""

    rope_type: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: float = Field(ge=1)
    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    """Length of the sequences in pre-training."""
    low_freq_factor: float | None = Field(default=None, gt=0)
    high_freq_factor: float | None = Field(default=None, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)
    """None: 0.1 ln(factor) + 1."""
    beta_fast: float | None = Field(default=None, gt=0)
    """None: 32."""
    beta_slow: float | None = Field(default=None, gt=0)
    """None: 1."""

    @property
    def original_length(self) -> int:
        assert self.original_max_position_embeddings is not None, f"{self.rope_type} has no original length"
        return self.original_max_position_embeddings

    @model_validator(mode="after")
    def _keys_fit_the_type(self) -> "RopeScaling":
        needed, optional = ROPE_KEYS[self.rope_type]
        given = {name for name in self.model_dump(exclude_none=True) if name not in ("rope_type", "factor")}
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"rope_type {self.rope_type} needs {', '.join(missing)}")
        if unknown := sorted(given - {*needed, *optional}):
            raise ValueError(f"rope_type {self.rope_type} does not use {', '.join(unknown)}; leave it out")
        if self.rope_type == "llama3" and (self.low_freq_factor or 0) >= (self.high_freq_factor or 0):
            raise ValueError("low_freq_factor must be less than high_freq_factor")
        return self


class ModelConfig(Section):
    """A Llama-style decoder. `preset` gives the sizes, and every size that is also set replaces the preset's."""

    name: Annotated[str, one_of((), "my_package.models:GatedConv")] | None = None
    """An own model instead, by its import path: inner/parallel/own_model.py. It has vocab_size, and no other setting of
    this section."""
    options: Options = Field(default_factory=dict)
    """Arguments of an own model."""
    init_from: str | None = None
    """Folder in Hugging Face's layout. Its weights are the initial weights, and its config.json gives the sizes."""
    init_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of its *.safetensors, concatenated in the order of their names. None: filled in when the run starts."""
    preset: str | None = None
    dim: int | None = Field(default=None, ge=8)
    num_layers: int | None = Field(default=None, ge=1, le=10000)
    num_heads: int | None = Field(default=None, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    """Size of a head. None: dim / num_heads."""
    ffn_dim: int | None = Field(default=None, ge=8)
    vocab_size: int | None = Field(default=None, ge=2)
    """None: the size of the tokenizer's vocabulary."""
    rope_theta: float | None = Field(default=None, gt=0)
    """None: the preset's value, or 10000 without a preset."""
    rope_scaling: RopeScaling | None = None
    norm_eps: float = Field(default=1e-5, gt=0)
    qk_norm: bool = False
    """RMSNorm of each query and key head, as in Qwen3."""
    qkv_bias: bool = False
    """Biases of the query, key and value projections, as in Qwen2.5."""
    tie_embeddings: bool | None = None

    @model_validator(mode="after")
    def _an_own_model_has_its_own_settings(self) -> Self:
        if self.options and self.name is None:
            raise ValueError("options are those of an own model, and there is no name; leave options out")
        given = sorted(self.model_dump(exclude_defaults=True).keys() - {"name", "options", "vocab_size"})
        if self.name is not None and given:
            raise ValueError(
                f"{', '.join(given)}: of ours, and name is {self.name}; leave it out or put it into options"
            )
        return self
