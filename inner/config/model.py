"""Config of the model."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from inner.config.decoder import DecoderConfig
from inner.config.experts import ExpertsConfig, LatentConfig, PredictConfig
from inner.config.section import Section
from inner.import_path import Options, one_of

FusedType = Literal["phi3", "gpt_neox", "gpt2", "falcon", "mpt"]
QkNorm = bool | Literal["whole"]
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()),
    "dynamic": (("original_max_position_embeddings",), ()),
    "llama3": (("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("original_max_position_embeddings",),
        (
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
        ),
    ),
}
"""For each type of RoPE scaling: the keys that it needs beside `rope_type` and `factor`, and the
keys that it also accepts."""

LATER = ("experts", "latent", "predict", "decoder", "model_type")
"""Fields of the model's section that were added later."""


class RopeScaling(Section):
    """How RoPE is scaled for sequences longer than in pre-training, with the names that
    transformers uses. See inner/model/rope.py.
    """

    rope_type: Literal["linear", "dynamic", "llama3", "yarn"]
    """The rule by which positions are scaled."""
    factor: float = Field(ge=1)
    """Ratio of the longest possible sequence to the sequences in pre-training."""
    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    """Length of the sequences in pre-training."""
    low_freq_factor: float | None = Field(default=None, gt=0)
    """For llama3: a frequency with fewer turns than this within the original length is divided by
    the whole factor."""
    high_freq_factor: float | None = Field(default=None, gt=0)
    """For llama3: a frequency with more turns than this within the original length is not
    changed."""
    attention_factor: float | None = Field(default=None, gt=0)
    """For yarn: the factor by which cosines and sines are multiplied. null: 0.1 ln(factor) + 1."""
    beta_fast: float | None = Field(default=None, gt=0)
    """For yarn: a frequency with at least this many turns within the original length is not
    changed. null: 32."""
    beta_slow: float | None = Field(default=None, gt=0)
    """For yarn: a frequency with fewer turns than this within the original length is divided by the
    whole factor. null: 1."""

    mscale: float | None = Field(default=None, gt=0)
    """For yarn, with mscale_all_dim: cosines and sines are multiplied by the ratio of
    0.1 mscale ln(factor) + 1 to the same with mscale_all_dim. null: see attention_factor."""
    mscale_all_dim: float | None = Field(default=None, gt=0)
    """For yarn in latent attention: attention scores are multiplied by the square of
    0.1 mscale_all_dim ln(factor) + 1. null: they are not."""

    @property
    def original_length(self) -> int:
        assert self.original_max_position_embeddings is not None, (
            f"{self.rope_type} needs original_max_position_embeddings"
        )
        return self.original_max_position_embeddings

    @model_validator(mode="after")
    def _keys_fit_the_type(self) -> "RopeScaling":
        needed, optional = ROPE_KEYS[self.rope_type]
        given = {
            name
            for name in self.model_dump(exclude_none=True)
            if name not in ("rope_type", "factor")
        }
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"rope_type {self.rope_type} needs {', '.join(missing)}")
        if unknown := sorted(given - {*needed, *optional}):
            raise ValueError(
                f"rope_type {self.rope_type} does not use {', '.join(unknown)}; leave it out"
            )
        if self.rope_type == "llama3" and (self.low_freq_factor or 0) >= (
            self.high_freq_factor or 0
        ):
            raise ValueError("low_freq_factor must be less than high_freq_factor")
        return self


class ModelConfig(Section):
    """A Llama-style decoder. `preset` gives all sizes; a size that is set beside it replaces the
    preset's.
    """

    name: Annotated[str, one_of((), "my_package.models:GatedConv")] | None = None
    """Import path of an own model, which replaces the decoder: inner/parallel/own_model.py. Of this
    section, only vocab_size and options may be set beside it."""
    options: Options = Field(default_factory=dict)
    """Arguments of an own model."""
    init_from: str | None = None
    """Folder in Hugging Face's layout. Its weights are the initial weights, and its config.json
    gives the sizes.
    """
    init_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the *.safetensors files of init_from, concatenated in the order of their names.
    null: filled in when the run starts."""
    preset: str | None = None
    """Sizes by name: 1m, 4m, 15m, 60m, 150m, 400m, or Llama 3's 1b, 3b, 8b, 70b, 405b."""
    dim: int | None = Field(default=None, ge=8)
    """Width of the residual stream."""
    num_layers: int | None = Field(default=None, ge=1, le=10000)
    """Number of blocks."""
    num_heads: int | None = Field(default=None, ge=1)
    """Number of query heads of a block."""
    num_kv_heads: int | None = Field(default=None, ge=1)
    """Number of key and value heads of a block. It must divide num_heads."""
    head_dim: int | None = Field(default=None, ge=2)
    """Size of a head. null: dim / num_heads."""
    ffn_dim: int | None = Field(default=None, ge=8)
    """Width of the hidden layer in the SwiGLU feed-forward of a block. In a mixture of experts it
    is for blocks without experts; null: the width of an expert."""
    vocab_size: int | None = Field(default=None, ge=2)
    """Number of rows of the embedding, at least the number of tokens of the tokenizer. null: that
    number."""
    rope_theta: float | None = Field(default=None, gt=0)
    """Base of the wavelengths of RoPE. null: the preset's value, or 10000 without a preset."""
    rope_scaling: RopeScaling | None = None
    """How RoPE is scaled for long sequences. null: RoPE is not scaled."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square inside every RMSNorm."""
    qk_norm: QkNorm = False
    """RMSNorm of queries and keys: `true` norms each head, as in Qwen3, and `whole` all heads of a
    position together, as in OLMoE."""
    qkv_bias: bool = False
    """Biases of the query, key and value projections, as in Qwen2.5."""
    decoder: DecoderConfig | None = None
    """What distinguishes other families of decoders: norms, activations, positions, windows, soft
    caps. null: as the preset, or as in Llama."""
    experts: ExpertsConfig | None = None
    """A mixture of experts instead of one feed-forward per block. null: as the preset, or none."""
    latent: LatentConfig | None = None
    """Multi-head latent attention, as in DeepSeek-V3. null: as the preset, or ordinary
    attention.
    """
    predict: PredictConfig | None = None
    """Multi-token prediction, as in DeepSeek-V3. null: as the preset, or none."""
    model_type: FusedType | None = None
    """The model type of transformers of an export, where several compute this model and hold its
    tensors in another way. It is taken from init_from. null: the first that computes it."""
    tie_embeddings: bool | None = None
    """Whether the head uses the embedding's weights. null: the preset's choice, or false without a
    preset.
    """

    @property
    def later_defaults(self) -> dict[str, Any]:
        """Keys at their defaults that were added later, in pydantic's form for `exclude`. Runs of
        earlier versions do not have them.
        """
        later: dict[str, Any] = {name: True for name in LATER if getattr(self, name) is None}
        if self.rope_scaling is not None:
            unset = {
                name
                for name in ("mscale", "mscale_all_dim")
                if getattr(self.rope_scaling, name) is None
            }
            later["rope_scaling"] = unset
        return later

    @model_validator(mode="after")
    def _an_own_model_has_its_own_settings(self) -> Self:
        if self.options and self.name is None:
            raise ValueError(
                "options are for an own model only, and no name is given; leave options out"
            )
        given = sorted(
            self.model_dump(exclude_defaults=True).keys() - {"name", "options", "vocab_size"}
        )
        if self.name is not None and given:
            raise ValueError(
                f"{', '.join(given)}: for the built-in model only, and name is {self.name}; leave "
                "it out or put it into options"
            )
        return self
