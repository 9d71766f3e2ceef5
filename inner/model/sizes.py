"""Model sizes: the presets, and how sizes follow from a config. No torch here."""

import math
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from inner.config import (
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    PredictConfig,
    QkNorm,
    RopeScaling,
)
from inner.errors import InputError
from inner.model.size_checks import check_sizes

BYTE_VOCAB_SIZE = 260


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """All sizes and constants that define a model."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int
    own_head_dim: int | None = None
    """Size of a head if it is not dim / num_heads; None if it is."""
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: QkNorm = False
    """Whether each query and key head is normed; `whole`: all heads of a position together."""
    qkv_bias: bool = False
    tie_embeddings: bool = False
    experts: ExpertsConfig | None = None
    """The mixture of experts; None: every block has one feed-forward."""
    latent: LatentConfig | None = None
    """Latent attention; None: ordinary attention."""
    predict: PredictConfig | None = None
    """Multi-token prediction; None: only the next token is predicted."""
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    """What distinguishes the decoder from Llama."""
    model_type: str | None = None
    """The model type of transformers of an export, if several compute the model."""

    @property
    def head_dim(self) -> int:
        """Size of a query or key head."""
        if self.latent is not None:
            return self.latent.qk_dim
        return self.own_head_dim or self.dim // self.num_heads

    @property
    def rope_dim(self) -> int:
        """Size of the part of a head that RoPE rotates; 0 without RoPE."""
        if self.latent is not None:
            return self.latent.rope_dim
        return (self.decoder.rotary_dim or self.head_dim) if self.decoder.positions == "rope" else 0

    @property
    def value_dim(self) -> int:
        """Size of a value head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def q_dim(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def normed_dims(self) -> tuple[int, int]:
        """Numbers of elements of queries and of keys that one norm of `qk_norm` takes together."""
        return (
            (self.q_dim, self.kv_dim) if self.qk_norm == "whole" else (self.head_dim, self.head_dim)
        )

    @property
    def attended_dim(self) -> int:
        """Width of the result of attention over all heads."""
        return self.num_heads * self.value_dim

    @property
    def kv_dim(self) -> int:
        """Width of the keys of all heads, and of their values."""
        return self.num_kv_heads * self.head_dim

    @property
    def query_factor(self) -> float:
        """Factor of the queries, beside the division of scores by the square root of a head's
        size.
        """
        query_dim = self.decoder.query_dim
        return 1.0 if query_dim is None else math.sqrt(self.head_dim / query_dim)

    @property
    def outside_params(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters outside of the blocks, in the order of
        `Transformer.named_parameters()`: those before the blocks, then those from `norm.weight` on.
        """
        table = self.vocab_size, self.dim
        learned = self.decoder.max_positions
        found: dict[str, tuple[int, ...]] = {"embed.weight": table}
        found |= {} if learned is None else {"position.weight": (learned, self.dim)}
        found |= {"norm.weight": (self.dim,)} | (
            {"norm.bias": (self.dim,)} if self.decoder.has_norm_bias else {}
        )
        return found if self.tie_embeddings else found | {"head.weight": table}

    @property
    def num_depths(self) -> int:
        """Number of extra depths of multi-token prediction."""
        return 0 if self.predict is None else self.predict.depths

    @property
    def predicting_layers(self) -> range:
        """Numbers of the blocks of the extra depths, which follow those of the model."""
        return range(self.num_layers, self.num_layers + self.num_depths)

    @property
    def all_layers(self) -> range:
        """Numbers of all blocks, also of the extra depths."""
        return range(self.predicting_layers.stop)

    @property
    def last_stage_embeds(self) -> bool:
        """Whether the last pipeline stage has the embedding's table: as its head, or to embed the
        tokens of the extra depths.
        """
        return self.tie_embeddings or self.num_depths > 0

    def has_experts(self, layer: int) -> bool:
        """Return whether a block's feed-forward is a mixture of experts."""
        return self.experts is not None and layer >= self.experts.dense_layers

    def layer_kinds(self, layers: range) -> list[tuple[bool, int]]:
        """Return how many of some consecutive layers are dense, and how many have experts, as
        (has_experts, count). A kind that does not occur is left out.
        """
        first = min(max(self.expert_layers.start, layers.start), layers.stop)
        kinds = [(False, first - layers.start), (True, layers.stop - first)]
        return [(has_experts, count) for has_experts, count in kinds if count]

    @property
    def expert_layers(self) -> range:
        """Numbers of the blocks with a mixture of experts, also of extra depths."""
        end = self.all_layers.stop
        return range(end if self.experts is None else self.experts.dense_layers, end)


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """An own model, which replaces the built-in decoder, see inner/parallel/own_model.py."""

    name: str
    """Its import path."""
    options: dict[str, Any]
    vocab_size: int


_bytes = partial(ModelSizes, vocab_size=BYTE_VOCAB_SIZE)
# Llama 3.1 and 3.2, without their RoPE scaling for long contexts.
_llama3 = partial(ModelSizes, num_kv_heads=8, vocab_size=128256, rope_theta=500000.0)
PRESETS: dict[str, ModelSizes] = {
    "1m": _bytes(dim=128, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=512),
    "4m": _bytes(dim=256, num_layers=5, num_heads=4, num_kv_heads=2, ffn_dim=768),
    "15m": _bytes(dim=384, num_layers=8, num_heads=6, num_kv_heads=2, ffn_dim=1280),
    "60m": _bytes(dim=640, num_layers=12, num_heads=10, num_kv_heads=2, ffn_dim=2048),
    "150m": _bytes(dim=1024, num_layers=12, num_heads=16, num_kv_heads=4, ffn_dim=3200),
    "400m": _bytes(dim=1280, num_layers=20, num_heads=20, num_kv_heads=4, ffn_dim=4096),
    "1b": _llama3(dim=2048, num_layers=16, num_heads=32, ffn_dim=8192, tie_embeddings=True),
    "3b": _llama3(dim=3072, num_layers=28, num_heads=24, ffn_dim=8192, tie_embeddings=True),
    "8b": _llama3(dim=4096, num_layers=32, num_heads=32, ffn_dim=14336, tie_embeddings=False),
    "70b": _llama3(dim=8192, num_layers=80, num_heads=64, ffn_dim=28672, tie_embeddings=False),
    "405b": _llama3(dim=16384, num_layers=126, num_heads=128, ffn_dim=53248, tie_embeddings=False),
    # DeepSeek-V3's kind of model in the small.
    "1m-experts": _bytes(
        dim=96,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        ffn_dim=256,
        experts=ExpertsConfig(
            number=16, per_token=2, dim=64, shared=1, dense_layers=1, scores="sigmoid"
        ),
        latent=LatentConfig(kv_rank=32, nope_dim=16, rope_dim=16, value_dim=24),
    ),
    # OLMoE-1B-7B (2409.02060): 1.3 of 6.9 billion parameters are active per token.
    "7b-a1b": ModelSizes(
        dim=2048,
        num_layers=16,
        num_heads=16,
        num_kv_heads=16,
        ffn_dim=1024,
        vocab_size=50304,
        qk_norm="whole",
        experts=ExpertsConfig(number=64, per_token=8, dim=1024, renormalise=False),
    ),
    "qwen3-30b-a3b": ModelSizes(
        dim=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        own_head_dim=128,
        ffn_dim=6144,
        vocab_size=151936,
        rope_theta=1e6,
        norm_eps=1e-6,
        qk_norm=True,
        experts=ExpertsConfig(number=128, per_token=8, dim=768),
    ),
    # Without its layer of multi-token prediction, and without RoPE's scaling for long contexts.
    "deepseek-v3": ModelSizes(
        dim=7168,
        num_layers=61,
        num_heads=128,
        num_kv_heads=128,
        ffn_dim=18432,
        vocab_size=129280,
        norm_eps=1e-6,
        experts=ExpertsConfig(
            number=256,
            per_token=8,
            dim=2048,
            shared=1,
            dense_layers=3,
            scores="sigmoid",
            groups=8,
            kept_groups=4,
            scale=2.5,
        ),
        latent=LatentConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    ),
}

_REQUIRED = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim")


def resolve_model(config: ModelConfig, vocab_size: int) -> ModelSizes | OwnModel:
    """Return the model to train: sizes of the built-in decoder, or an own model. Raises InputError
    if sizes do not fit.
    """
    if config.name is None:
        return resolve_sizes(config, vocab_size)
    _check_vocab_size(config, vocab_size)
    return OwnModel(
        name=config.name, options=config.options, vocab_size=config.vocab_size or vocab_size
    )


def _check_vocab_size(config: ModelConfig, vocab_size: int) -> None:
    if config.vocab_size is not None and config.vocab_size < vocab_size:
        raise InputError(
            f"model.vocab_size ({config.vocab_size}) is smaller than the tokenizer's "
            f"({vocab_size}); set it to at least {vocab_size} or leave it out"
        )


def resolve_sizes(config: ModelConfig, vocab_size: int) -> ModelSizes:
    """Apply the config to its preset; `vocab_size` is the tokenizer's. Raises InputError if the
    sizes do not fit.

    Raises InputError also for an own model, because its FLOPs, memory and traffic are unknown.
    """
    if config.name is not None:
        raise InputError(
            f"model.name: {config.name} is an own model: its FLOPs, memory and traffic cannot be "
            "counted, and its "
            "weights cannot be exported; use it with `train`, `launch`, `simulate` and `join`"
        )
    _check_vocab_size(config, vocab_size)
    given = {each.name: getattr(config, each.name, None) for each in fields(ModelSizes)}
    # A value at its default leaves that of the preset.
    defaults = {name: info.default for name, info in ModelConfig.model_fields.items()}
    overrides = {
        name: value
        for name, value in given.items()
        if value is not None and value != defaults[name]
    }
    if config.head_dim is not None:
        overrides["own_head_dim"] = config.head_dim
    overrides.setdefault("vocab_size", vocab_size)
    if config.preset is None:
        if config.experts is not None and not config.experts.dense_layers:
            overrides.setdefault("ffn_dim", config.experts.dim)
        missing = [name for name in _REQUIRED if name not in overrides]
        if missing:
            raise InputError(
                f"model: no preset, and {', '.join(missing)} not given; set model.preset to one of "
                f"{', '.join(PRESETS)}, or give every size"
            )
        sizes = ModelSizes(**overrides)
    elif config.preset in PRESETS:
        sizes = replace(PRESETS[config.preset], **overrides)
    else:
        near = get_close_matches(config.preset.lower(), PRESETS, n=1, cutoff=0.0)[0]
        allowed = ", ".join(PRESETS)
        raise InputError(
            f"model.preset {config.preset!r} is unknown; nearest is {near!r}; allowed: {allowed}"
        )
    check_sizes(sizes)
    return sizes
