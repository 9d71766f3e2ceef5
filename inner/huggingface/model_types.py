"""The model types of transformers that can be imported and exported, and features of a config.json
that are refused. No torch here.

All types are the same decoder with small differences: Llama 1 to 3.2, SmolLM 1 and 2, Mistral,
Qwen2 and 2.5, Qwen3, with experts Qwen3-MoE, OLMoE, Mixtral and DeepSeek-V3, and other models whose
config.json names one of these types. What is special to experts is in mixtures.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from inner.config import QkNorm
from inner.errors import InputError
from inner.huggingface.mixtures import (
    DEEPSEEK,
    build_mixture_keys,
    find_obstacles,
    find_unsupported_mixture,
    has_biases,
    has_latent,
)
from inner.huggingface.rope_settings import find_unsupported_rope
from inner.model.sizes import ModelSizes

SIZES = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True)
class ModelType:
    """A model type: its distinctive features, and the defaults of transformers for keys that a
    config.json leaves out.
    """

    architecture: str
    qk_norm: QkNorm = False
    qkv_bias: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    head_dim: int | None = None
    """Size of a head if the config.json does not give it. None: dim / num_heads."""
    num_kv_heads_is_optional: bool = False
    slides_by_default: bool = True
    """Whether a sliding_window is in use without use_sliding_window."""
    slides_in_some_layers: bool = False
    """Whether max_window_layers or layer_types name the layers in which attention slides."""
    sliding_window: int | None = None
    """The window if the config.json has no such key."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of this type alone that are like FIXED."""


MODEL_TYPES = {
    "llama": ModelType("LlamaForCausalLM", num_kv_heads_is_optional=True),
    "mistral": ModelType("MistralForCausalLM", sliding_window=4096),
    "qwen2": ModelType("Qwen2ForCausalLM", qkv_bias=True, slides_by_default=False, slides_in_some_layers=True),
    "qwen3": ModelType(
        "Qwen3ForCausalLM", qk_norm=True, head_dim=128, slides_by_default=False, slides_in_some_layers=True
    ),
    "qwen3_moe": ModelType(
        "Qwen3MoeForCausalLM", qk_norm=True, slides_by_default=False, fixed={"decoder_sparse_step": (1,)}
    ),
    "olmoe": ModelType(
        "OlmoeForCausalLM", qk_norm="whole", norm_eps=1e-5, num_kv_heads_is_optional=True, fixed={"clip_qkv": (None,)}
    ),
    "mixtral": ModelType("MixtralForCausalLM", norm_eps=1e-5, rope_theta=1e6),
    DEEPSEEK: ModelType(
        "DeepseekV3ForCausalLM",
        fixed={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    ),
}
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
}
"""Keys for which this model supports only one value, with all names of that value. null counts as
that value."""
WINDOW_LAYERS = 28
"""The first layer with a sliding window in Qwen2 and Qwen3 if the config.json does not set it."""
SLIDING = "sliding_attention"


def choose_model_type(sizes: ModelSizes) -> str:
    """Return the model type with which transformers computes this model. Raises InputError if there
    is none.
    """
    model_type = _nearest_type(sizes)
    if obstacles := find_export_obstacles(sizes, 0.0):
        listed = "\n".join(f"  {line}" for line in obstacles)
        raise InputError(
            "this model cannot be exported, because transformers has no model type for it among those that are "
            f"supported here; the nearest is {model_type}:\n{listed}"
        )
    return model_type


def find_export_obstacles(sizes: ModelSizes, bias_speed: float) -> list[str]:
    """Return the reasons for which a model cannot be exported after it was trained with
    optimizer.balance.bias_speed; empty if it can.
    """
    model_type = _nearest_type(sizes)
    obstacles = list(find_obstacles(sizes, model_type))
    if sizes.experts is not None and bias_speed and not has_biases(model_type):
        obstacles.append(
            f"optimizer.balance.bias_speed is {bias_speed:g}, and routers of {model_type} have no biases; 0 keeps "
            "them away"
        )
    return obstacles


def _nearest_type(sizes: ModelSizes) -> str:
    """Return the model type that has the attention of this model, and experts if it has any."""
    if sizes.latent is not None:
        return DEEPSEEK
    if sizes.experts is not None:
        return {True: "qwen3_moe", "whole": "olmoe", False: "mixtral"}[sizes.qk_norm]
    if sizes.qk_norm:
        return "qwen3"
    if sizes.qkv_bias:
        return "qwen2"
    # transformers refuses a Llama whose width is not a multiple of its heads, even if the size of a
    # head is given.
    return "mistral" if sizes.dim % sizes.num_heads else "llama"


def build_type_keys(sizes: ModelSizes) -> dict[str, Any]:
    """Return the keys of a config.json that name the type, describe experts, and switch off features
    that this model does not have. Raises InputError if no type computes this model.
    """
    model_type = choose_model_type(sizes)
    keys: dict[str, Any] = {"architectures": [MODEL_TYPES[model_type].architecture], "model_type": model_type}
    keys |= build_mixture_keys(sizes, model_type)
    if model_type in ("llama", "qwen3", "qwen3_moe", "olmoe", DEEPSEEK):
        keys["attention_bias"] = False
    if model_type == "llama":
        keys["mlp_bias"] = False
    if model_type == "olmoe":
        keys["clip_qkv"] = None
    if model_type in ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"):
        keys["sliding_window"] = None
    if model_type in ("qwen2", "qwen3", "qwen3_moe"):
        keys["use_sliding_window"] = False
    return keys


def find_window(config: dict[str, Any]) -> int | None:
    """Return the sliding window of a supported type, in tokens; None if attention sees the whole
    sequence in all layers.
    """
    model_type = MODEL_TYPES[config["model_type"]]
    window = config.get("sliding_window", model_type.sliding_window)
    if window is None or not config.get("use_sliding_window", model_type.slides_by_default):
        return None
    if not model_type.slides_in_some_layers:
        return window
    if layer_types := config.get("layer_types"):
        return window if SLIDING in layer_types else None
    first = config.get("max_window_layers", WINDOW_LAYERS)
    num_layers = config.get("num_hidden_layers")
    return None if isinstance(first, int) and isinstance(num_layers, int) and first >= num_layers else window


def find_unsupported(config: dict[str, Any], longest: int | None) -> Iterator[str]:
    """Yield messages about features of a config.json that this model does not support.

    `longest`: number of tokens in the longest sequence that will be computed; None: the maximum of
    the config.json.
    """
    name = config.get("model_type")
    if name not in MODEL_TYPES:
        yield f"model_type is {name!r}; allowed: {', '.join(MODEL_TYPES)}"
        return
    model_type = MODEL_TYPES[name]
    required = [key for ours, key in SIZES.items() if ours != "num_kv_heads"]
    yield from (f"{key} is missing" for key in required if config.get(key) is None)
    if "num_key_value_heads" not in config and not model_type.num_kv_heads_is_optional:
        yield "num_key_value_heads is missing"
    for key, allowed in {**FIXED, **model_type.fixed}.items():
        if config.get(key) not in (None, *allowed):
            yield f"{key} is {config[key]!r}; allowed: {', '.join(map(repr, allowed))}"
    yield from _find_unsupported_window(config, longest or config.get("max_position_embeddings"))
    yield from find_unsupported_rope(config)
    yield from find_unsupported_mixture(config)


def _find_unsupported_window(config: dict[str, Any], longest: object) -> Iterator[str]:
    window = find_window(config)
    types = set(config.get("layer_types") or ())
    if window is not None and not (isinstance(window, int) and isinstance(longest, int) and longest <= window):
        yield (
            f"sliding_window is {window!r}; attention here sees the whole sequence, which gives the same result only "
            f"up to the length of the window (data.seq_len), and sequences have {longest!r} tokens"
        )
    if unknown := types - {"full_attention", *([] if window is None else [SLIDING])}:
        yield f"layer_types has {', '.join(map(repr, sorted(unknown)))}; allowed: 'full_attention'"


def read_head_dim(config: dict[str, Any]) -> int | None:
    """Return the size of a head from the config or the type's default; None if it is dim /
    num_heads, and for latent attention, which has sizes of its own.
    """
    if has_latent(config["model_type"]):
        return None
    head_dim = config.get("head_dim") or MODEL_TYPES[config["model_type"]].head_dim
    dim = config["hidden_size"]
    num_heads = config["num_attention_heads"]
    if head_dim is None or not isinstance(dim, int) or not isinstance(num_heads, int):
        return None
    return head_dim if head_dim * num_heads != dim else None
