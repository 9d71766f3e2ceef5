"""Model sizes: the presets, what a config makes of them, and the exact number of parameters. No torch here."""

from dataclasses import dataclass, replace
from difflib import get_close_matches

from inner.config import ModelConfig
from inner.errors import InputError, nearest_multiples

BYTE_VOCAB_SIZE = 260


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Everything that fixes a model's parameters and their use."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tie_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


def _bytes(dim: int, num_layers: int, num_heads: int, num_kv_heads: int, ffn_dim: int) -> ModelSizes:
    """A small model, named by its size with the byte vocabulary."""
    return ModelSizes(
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn_dim=ffn_dim,
        vocab_size=BYTE_VOCAB_SIZE,
    )


def _llama3(dim: int, num_layers: int, num_heads: int, ffn_dim: int, tie_embeddings: bool) -> ModelSizes:
    """The shapes of Llama 3.1 and 3.2 (without their stretching of RoPE to long contexts)."""
    return ModelSizes(
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        ffn_dim=ffn_dim,
        vocab_size=128256,
        rope_theta=500000.0,
        tie_embeddings=tie_embeddings,
    )


PRESETS: dict[str, ModelSizes] = {
    "1m": _bytes(128, 4, 4, 2, 512),
    "4m": _bytes(256, 5, 4, 2, 768),
    "15m": _bytes(384, 8, 6, 2, 1280),
    "60m": _bytes(640, 12, 10, 2, 2048),
    "150m": _bytes(1024, 12, 16, 4, 3200),
    "400m": _bytes(1280, 20, 20, 4, 4096),
    "1b": _llama3(2048, 16, 32, 8192, tie_embeddings=True),
    "3b": _llama3(3072, 28, 24, 8192, tie_embeddings=True),
    "8b": _llama3(4096, 32, 32, 14336, tie_embeddings=False),
}

_REQUIRED = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim")
_OPTIONAL = ("rope_theta", "tie_embeddings")


def num_params(sizes: ModelSizes) -> int:
    """Exact number of parameters, tied embeddings counted once."""
    kv_dim = sizes.num_kv_heads * sizes.head_dim
    attention = 2 * sizes.dim * sizes.dim + 2 * sizes.dim * kv_dim
    norms = 2 * sizes.dim + (2 * sizes.head_dim if sizes.qk_norm else 0)
    layer = attention + norms + 3 * sizes.dim * sizes.ffn_dim
    num_tables = 1 if sizes.tie_embeddings else 2
    return num_tables * sizes.vocab_size * sizes.dim + sizes.num_layers * layer + sizes.dim


def resolve_sizes(config: ModelConfig, vocab_size: int) -> ModelSizes:
    """The preset with the config's overrides, checked. `vocab_size` is the tokenizer's. Raises InputError."""
    overrides = {name: getattr(config, name) for name in _REQUIRED + _OPTIONAL}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    overrides |= {"norm_eps": config.norm_eps, "qk_norm": config.qk_norm}
    overrides["vocab_size"] = _vocab_size(config, vocab_size)
    if config.preset is None:
        missing = [name for name in _REQUIRED if name not in overrides]
        if missing:
            raise InputError(
                f"model: no preset, and {', '.join(missing)} not given; set model.preset to one of "
                f"{', '.join(PRESETS)}, or give every size"
            )
        sizes = ModelSizes(**overrides)
    else:
        sizes = replace(_preset(config.preset), **overrides)
    _check_heads(sizes)
    return sizes


def _preset(name: str) -> ModelSizes:
    if name not in PRESETS:
        near = get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.0)[0]
        raise InputError(f"model.preset {name!r} is unknown; nearest is {near!r}; allowed: {', '.join(PRESETS)}")
    return PRESETS[name]


def _vocab_size(config: ModelConfig, tokenizer_size: int) -> int:
    if config.vocab_size is None:
        return tokenizer_size
    if config.vocab_size < tokenizer_size:
        raise InputError(
            f"model.vocab_size ({config.vocab_size}) is smaller than the tokenizer's ({tokenizer_size}); "
            f"set it to at least {tokenizer_size} or leave it out"
        )
    return config.vocab_size


def _check_heads(sizes: ModelSizes) -> None:
    """Heads must cut dim into even head sizes (RoPE turns pairs), and share key-value heads evenly."""
    if sizes.dim % (2 * sizes.num_heads):
        step = 2 * sizes.num_heads
        raise InputError(
            f"model.dim ({sizes.dim}) must be a multiple of 2 x num_heads ({sizes.num_heads}); "
            f"try model.dim {nearest_multiples(sizes.dim, step)}"
        )
    if sizes.num_heads % sizes.num_kv_heads:
        divisors = [n for n in range(1, sizes.num_heads + 1) if sizes.num_heads % n == 0]
        raise InputError(
            f"model.num_heads ({sizes.num_heads}) must be a multiple of num_kv_heads "
            f"({sizes.num_kv_heads}); try num_kv_heads {', '.join(map(str, divisors))}"
        )
