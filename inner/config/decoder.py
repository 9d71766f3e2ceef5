"""Config of what distinguishes families of decoders."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from inner.config.section import Section

NormKind = Literal["rms", "rms_plus_one", "layer", "layer_unbiased"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]


class WindowConfig(Section):
    """Sliding windows: positions see only the last positions before them."""

    size: int = Field(ge=1)
    """Number of positions that a position sees, itself among them."""
    full_every: int | None = Field(default=None, ge=2)
    """Every layer with a number of this multiple, counted from 1, sees the whole sequence: 2 in
    Gemma 2, 6 in Gemma 3. null: none."""
    first_layer: int = Field(default=0, ge=0)
    """Number of layers at the beginning that see the whole sequence, as in Qwen2."""
    rope_theta: float | None = Field(default=None, gt=0)
    """Base of the wavelengths of RoPE in layers with a window, where RoPE is then not scaled, as in
    Gemma 3. null: model.rope_theta and model.rope_scaling."""

    def slides(self, layer: int) -> bool:
        """Return whether a layer has the window."""
        is_full = self.full_every is not None and (layer + 1) % self.full_every == 0
        return layer >= self.first_layer and not is_full


class DecoderConfig(Section):
    """What distinguishes a family of decoders from Llama. All keys enter the run's hash."""

    norm: NormKind = "rms"
    """The norms: `rms` is RMSNorm. `rms_plus_one` is RMSNorm that multiplies by 1 + weight, as in
    Gemma. `layer` is LayerNorm, as in GPT-2. `layer_unbiased` is LayerNorm without bias, as in
    Cohere."""
    norm_place: Literal["before", "after", "both"] = "before"
    """What is normed in a block: the inputs of attention and feed-forward (`before`), their
    outputs, as in OLMo 2 (`after`), or both, as in Gemma 2."""
    parallel: Literal["one_norm", "two_norms"] | None = None
    """Attention and feed-forward read the same stream, and their outputs are added to it together:
    behind one norm, as in Cohere, or behind a norm each, as in GPT-NeoX. null: one after the other.
    """
    activation: Activation = "silu"
    """The function in the feed-forward: SiLU, GELU, GELU approximated by a tanh, or the square of
    ReLU."""
    gated: bool = True
    """Whether the feed-forward multiplies the activated vector by a second one, as in SwiGLU.
    false: it has two matrices, as in GPT-2."""
    out_bias: bool = False
    """Bias of the output projection of attention."""
    ffn_bias: bool = False
    """Biases of the feed-forward's matrices."""
    positions: Literal["rope", "learned", "alibi"] = "rope"
    """How a model knows positions: RoPE; `learned` vectors that are added to the embedded tokens,
    as in GPT-2; or ALiBi, which lowers scores by the distance (2108.12409)."""
    max_positions: int | None = Field(default=None, ge=1)
    """Number of learned positions. It must be given for `learned`, and is not used otherwise."""
    rotary_dim: int | None = Field(default=None, ge=2)
    """Size of the first part of a head that RoPE turns, as in GPT-NeoX. null: the whole head."""
    no_rope_every: int | None = Field(default=None, ge=2)
    """Every layer with a number of this multiple, counted from 1, has no RoPE: 4 in SmolLM3. null:
    all layers have it."""
    window: WindowConfig | None = None
    """Sliding windows. null: all layers see the whole sequence."""
    query_dim: float | None = Field(default=None, gt=0)
    """Scores are divided by the square root of this value, as in Gemma 2. null: of the size of a
    head."""
    score_cap: float | None = Field(default=None, gt=0)
    """Soft cap c of attention scores s, as in Gemma 2: c tanh(s / c). null: none."""
    logit_cap: float | None = Field(default=None, gt=0)
    """Soft cap of the logits. null: none."""
    embed_scale: float | None = Field(default=None, gt=0)
    """Factor of the embedded tokens; in Gemma it is the square root of model.dim. null: 1."""
    logit_scale: float | None = Field(default=None, gt=0)
    """Factor of the logits, before their soft cap, as in Cohere. null: 1."""

    @property
    def norms_inputs(self) -> bool:
        """Whether the inputs of attention and feed-forward are normed."""
        return self.norm_place != "after"

    @property
    def norms_outputs(self) -> bool:
        """Whether the outputs of attention and feed-forward are normed."""
        return self.norm_place != "before"

    @property
    def has_ffn_norm(self) -> bool:
        """Whether the feed-forward has a norm of its own before it."""
        return self.norms_inputs and self.parallel != "one_norm"

    @property
    def num_norms(self) -> int:
        """Number of norms of the stream in a block."""
        return self.norms_inputs + self.has_ffn_norm + 2 * self.norms_outputs

    @property
    def has_layer_norm(self) -> bool:
        """Whether norms are LayerNorm."""
        return self.norm in ("layer", "layer_unbiased")

    @property
    def has_norm_bias(self) -> bool:
        """Whether norms have a bias."""
        return self.norm == "layer"

    @property
    def changes(self) -> dict[str, Any]:
        """The keys that are not as in Llama, and their values."""
        return {
            name: value
            for name in type(self).model_fields
            if (value := getattr(self, name)) != _default(name)
        }

    def has_rope(self, layer: int) -> bool:
        """Return whether RoPE turns the heads of a layer."""
        is_left_out = self.no_rope_every is not None and (layer + 1) % self.no_rope_every == 0
        return self.positions == "rope" and not is_left_out

    def window_of(self, layer: int) -> int | None:
        """Return the size of a layer's window; None if it sees the whole sequence."""
        return self.window.size if self.window is not None and self.window.slides(layer) else None

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> Self:
        if (self.max_positions is not None) != (self.positions == "learned"):
            raise ValueError("max_positions must be given for positions: learned, and only for it")
        of_rope = {name: getattr(self, name) for name in ("rotary_dim", "no_rope_every")}
        if self.positions != "rope" and (
            given := [name for name, value in of_rope.items() if value is not None]
        ):
            raise ValueError(
                f"{' and '.join(given)} belong to RoPE, and positions is {self.positions}; leave "
                "it out"
            )
        if self.rotary_dim is not None and self.rotary_dim % 2:
            raise ValueError(
                f"rotary_dim is {self.rotary_dim}; RoPE turns pairs, so it must be even"
            )
        if self.parallel is not None and self.norm_place != "before":
            raise ValueError(
                f"parallel needs norm_place: before, and it is {self.norm_place}; leave one of "
                "them out"
            )
        return self


def _default(name: str) -> Any:
    return DecoderConfig.model_fields[name].default
