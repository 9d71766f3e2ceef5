"""The model types of transformers that can be imported and exported. No torch here.

All types are one decoder with other settings. What is special to experts is in mixtures.py, and the
names of tensors are in names.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from inner.config import QkNorm
from inner.huggingface.mixtures import DEEPSEEK

SIZES = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
GPT2_SIZES = {"dim": "n_embd", "num_layers": "n_layer", "num_heads": "n_head", "ffn_dim": "n_inner"}
MPT_SIZES = {"dim": "d_model", "num_layers": "n_layers", "num_heads": "n_heads"}

SLIDING = "sliding_attention"
FULL = "full_attention"
"""transformers' names of layers with and without a window."""


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
    has_head_dim: bool = True
    """Whether a config.json may give the size of a head."""
    needs_whole_heads: bool = False
    """Whether transformers refuses a width that is not a multiple of the number of heads, even if
    the size of a head is given."""
    num_kv_heads_is_optional: bool = False
    slides_by_default: bool = True
    """Whether a sliding_window is in use without use_sliding_window."""
    window_layers: Literal["all", "listed"] | None = None
    """The layers with a window: all, or those that max_window_layers or layer_types name. None: the
    type has no windows."""
    sliding_window: int | None = None
    """The window if the config.json has no such key."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of this type alone that are like FIXED."""
    size_keys: Mapping[str, str] = field(default_factory=lambda: SIZES)
    """Keys of the sizes."""
    length_key: str = "max_position_embeddings"
    default_length: int | None = None
    theta_key: str = "rope_theta"
    """Key of RoPE's base in files of transformers 4."""
    norm_eps_key: str = "rms_norm_eps"
    activation_key: str | None = "hidden_act"
    """Key of the activation. None: it is always that in `decoder`."""
    decoder: Mapping[str, Any] = field(default_factory=dict)
    """Fields of DecoderConfig that are always the same, and not as in Llama."""
    decoder_keys: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Keys of further fields of DecoderConfig, with the defaults of transformers."""
    bias_keys: Mapping[str, tuple[tuple[str, ...], bool]] = field(default_factory=dict)
    """Keys that switch biases on: the names of these settings, and the default of transformers."""
    ties: bool = False
    """Whether the embedding is the head if the config.json does not say it."""
    scales_embeddings: bool = False
    """Whether embedded tokens are multiplied by the square root of the width."""
    full_every: int | None = None
    """Every such layer sees the whole sequence if the config.json does not list layers."""
    window_theta: float | None = None
    """Base of RoPE in layers with a window, if it is another one and the config.json does not give
    it."""
    has_rope_by_layer_type: bool = False
    """Whether layers with and without a window have RoPE settings of their own."""
    rotary_factor: float | None = None
    """Share of a head that RoPE turns, if the config.json does not give it. None: always the whole
    head."""
    rotary_key: str = "partial_rotary_factor"
    """Key of this share outside of RoPE's settings."""
    no_rope_every: int | None = None
    """Every such layer has no RoPE, if the config.json does not list layers. None: all have it."""


MODEL_TYPES = {
    "llama": ModelType(
        "LlamaForCausalLM",
        needs_whole_heads=True,
        num_kv_heads_is_optional=True,
        bias_keys={
            "attention_bias": (("qkv_bias", "out_bias"), False),
            "mlp_bias": (("ffn_bias",), False),
        },
    ),
    "mistral": ModelType("MistralForCausalLM", window_layers="all", sliding_window=4096),
    "qwen2": ModelType(
        "Qwen2ForCausalLM", qkv_bias=True, slides_by_default=False, window_layers="listed"
    ),
    "qwen3": ModelType(
        "Qwen3ForCausalLM",
        qk_norm=True,
        head_dim=128,
        slides_by_default=False,
        window_layers="listed",
    ),
    "qwen3_moe": ModelType(
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        slides_by_default=False,
        window_layers="all",
        fixed={"decoder_sparse_step": (1,)},
    ),
    "olmoe": ModelType(
        "OlmoeForCausalLM",
        qk_norm="whole",
        norm_eps=1e-5,
        has_head_dim=False,
        num_kv_heads_is_optional=True,
        fixed={"clip_qkv": (None,)},
    ),
    "mixtral": ModelType("MixtralForCausalLM", norm_eps=1e-5, rope_theta=1e6, window_layers="all"),
    DEEPSEEK: ModelType(
        "DeepseekV3ForCausalLM",
        fixed={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    ),
    "olmo2": ModelType(
        "Olmo2ForCausalLM",
        qk_norm="whole",
        norm_eps=1e-5,
        num_kv_heads_is_optional=True,
        decoder={"norm_place": "after"},
    ),
    "olmo3": ModelType(
        "Olmo3ForCausalLM",
        qk_norm="whole",
        norm_eps=1e-5,
        rope_theta=500000.0,
        num_kv_heads_is_optional=True,
        window_layers="listed",
        sliding_window=4096,
        full_every=4,
        has_rope_by_layer_type=True,
        decoder={"norm_place": "after"},
    ),
    "phi3": ModelType(
        "Phi3ForCausalLM",
        has_head_dim=False,
        norm_eps=1e-5,
        num_kv_heads_is_optional=True,
        window_layers="all",
        rotary_factor=1.0,
    ),
    "gemma": ModelType(
        "GemmaForCausalLM",
        needs_whole_heads=True,
        head_dim=256,
        ties=True,
        scales_embeddings=True,
        activation_key=None,
        decoder={"norm": "rms_plus_one", "activation": "gelu_tanh"},
        # The first files of Gemma name another function than the model was trained with.
        fixed={"hidden_act": ("gelu", "gelu_pytorch_tanh")},
    ),
    "gemma2": ModelType(
        "Gemma2ForCausalLM",
        needs_whole_heads=True,
        head_dim=256,
        ties=True,
        scales_embeddings=True,
        activation_key="hidden_activation",
        window_layers="listed",
        sliding_window=4096,
        full_every=2,
        decoder={"norm": "rms_plus_one", "norm_place": "both"},
        decoder_keys={
            "query_dim": ("query_pre_attn_scalar", 256),
            "score_cap": ("attn_logit_softcapping", 50.0),
            "logit_cap": ("final_logit_softcapping", 30.0),
        },
        fixed={"use_bidirectional_attention": (False,)},
    ),
    "gemma3_text": ModelType(
        "Gemma3ForCausalLM",
        needs_whole_heads=True,
        qk_norm=True,
        head_dim=256,
        rope_theta=1e6,
        ties=True,
        scales_embeddings=True,
        activation_key="hidden_activation",
        window_layers="listed",
        sliding_window=4096,
        full_every=6,
        window_theta=10000.0,
        has_rope_by_layer_type=True,
        decoder={"norm": "rms_plus_one", "norm_place": "both"},
        decoder_keys={
            "query_dim": ("query_pre_attn_scalar", 256),
            "logit_cap": ("final_logit_softcapping", None),
        },
        fixed={"use_bidirectional_attention": (False,), "attn_logit_softcapping": (None,)},
    ),
    "smollm3": ModelType(
        "SmolLM3ForCausalLM",
        rope_theta=2e6,
        ties=True,
        num_kv_heads_is_optional=True,
        no_rope_every=4,
        bias_keys={
            "attention_bias": (("qkv_bias", "out_bias"), False),
            "mlp_bias": (("ffn_bias",), False),
        },
        fixed={"use_sliding_window": (False,)},
    ),
    "gpt_neox": ModelType(
        "GPTNeoXForCausalLM",
        has_head_dim=False,
        norm_eps=1e-5,
        norm_eps_key="layer_norm_eps",
        size_keys={name: key for name, key in SIZES.items() if name != "num_kv_heads"},
        rotary_factor=0.25,
        rotary_key="rotary_pct",
        theta_key="rotary_emb_base",
        decoder={"norm": "layer", "gated": False, "ffn_bias": True},
        bias_keys={"attention_bias": (("qkv_bias", "out_bias"), True)},
    ),
    "gpt2": ModelType(
        "GPT2LMHeadModel",
        has_head_dim=False,
        qkv_bias=True,
        norm_eps=1e-5,
        norm_eps_key="layer_norm_epsilon",
        ties=True,
        size_keys={**GPT2_SIZES, "vocab_size": "vocab_size"},
        length_key="n_positions",
        activation_key="activation_function",
        decoder={
            "norm": "layer",
            "gated": False,
            "out_bias": True,
            "ffn_bias": True,
            "positions": "learned",
        },
        fixed={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
    ),
    "cohere": ModelType(
        "CohereForCausalLM",
        norm_eps=1e-5,
        norm_eps_key="layer_norm_eps",
        rope_theta=500000.0,
        ties=True,
        num_kv_heads_is_optional=True,
        decoder={"norm": "layer_unbiased", "parallel": "one_norm"},
        decoder_keys={"logit_scale": ("logit_scale", 0.0625)},
        bias_keys={"attention_bias": (("qkv_bias", "out_bias"), False)},
        fixed={"use_qk_norm": (False,)},
    ),
    "falcon": ModelType(
        "FalconForCausalLM",
        has_head_dim=False,
        norm_eps=1e-5,
        norm_eps_key="layer_norm_epsilon",
        ties=True,
        size_keys=SIZES | {"num_kv_heads": "num_kv_heads", "ffn_dim": "ffn_hidden_size"},
        num_kv_heads_is_optional=True,
        activation_key="activation",
        default_length=2048,
        decoder={"norm": "layer", "gated": False},
        bias_keys={"bias": (("qkv_bias", "out_bias", "ffn_bias"), False)},
        fixed={"alibi": (False,)},
    ),
    "mpt": ModelType(
        "MptForCausalLM",
        has_head_dim=False,
        norm_eps=1e-5,
        norm_eps_key="layer_norm_epsilon",
        ties=True,
        size_keys={**MPT_SIZES, "vocab_size": "vocab_size"},
        length_key="max_seq_len",
        activation_key=None,
        decoder={
            "norm": "layer_unbiased",
            "gated": False,
            "activation": "gelu",
            "positions": "alibi",
        },
        fixed={
            "logit_scale": (None,),
            "no_bias": (True,),
            "embedding_fraction": (1.0,),
            "expansion_ratio": (4,),
        },
    ),
}
FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
}
"""Keys for which this model supports only one value, with all names of that value. null counts as
that value. A type that supports more values has the key elsewhere."""
