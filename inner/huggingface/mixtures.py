"""How a config.json describes a mixture of experts and latent attention. No torch here.

A value of ExpertsConfig that a model type has no key for is fixed in that type: it is the default,
or the value in FIXED. Losses of the router change no result of a model and are not read.
"""

from collections.abc import Iterator
from typing import Any

from inner.config import ExpertsConfig
from inner.model.sizes import ModelSizes

DEEPSEEK = "deepseek_v3"
DENSE_LIST = "mlp_only_layers"
PREDICTORS = "num_nextn_predict_layers"
EXPERT_KEYS = {
    "qwen3_moe": {
        "number": "num_experts",
        "per_token": "num_experts_per_tok",
        "dim": "moe_intermediate_size",
        "dense_layers": DENSE_LIST,
        "renormalise": "norm_topk_prob",
    },
    "olmoe": {
        "number": "num_experts",
        "per_token": "num_experts_per_tok",
        "dim": "intermediate_size",
        "renormalise": "norm_topk_prob",
    },
    "mixtral": {
        "number": "num_local_experts",
        "per_token": "num_experts_per_tok",
        "dim": "intermediate_size",
    },
    DEEPSEEK: {
        "number": "n_routed_experts",
        "per_token": "num_experts_per_tok",
        "dim": "moe_intermediate_size",
        "shared": "n_shared_experts",
        "dense_layers": "first_k_dense_replace",
        "groups": "n_group",
        "kept_groups": "topk_group",
        "renormalise": "norm_topk_prob",
        "scale": "routed_scaling_factor",
    },
}
"""For each model type with experts, the keys of the fields of ExpertsConfig."""
FIXED: dict[str, dict[str, Any]] = {DEEPSEEK: {"scores": "sigmoid"}}
"""For each model type, fields that are always the same but not the default."""
OTHER_NAMES = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""Names that transformers 5 also writes for a key."""
LATENT_KEYS = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}


def mixture_keys(model_type: str) -> dict[str, str]:
    """Return a model type's keys for the fields of `model.experts` and `model.latent`, by the names
    of these fields.
    """
    keys = {f"experts.{ours}": theirs for ours, theirs in EXPERT_KEYS.get(model_type, {}).items()}
    return keys | {f"latent.{ours}": theirs for ours, theirs in LATENT_KEYS.items()}


def has_biases(model_type: str) -> bool:
    """Return whether a model type stores a bias for each router."""
    return model_type == DEEPSEEK


def has_latent(model_type: str) -> bool:
    """Return whether a model type has latent attention."""
    return model_type == DEEPSEEK


def find_unsupported_mixture(config: dict[str, Any]) -> Iterator[str]:
    """Yield messages about experts and latent attention in a config.json that this model does not
    support.
    """
    model_type = config["model_type"]
    if has_latent(model_type):
        yield from (f"{key} is missing" for key in LATENT_KEYS.values() if key not in config)
        heads = (config.get("num_attention_heads"), config.get("num_key_value_heads"))
        if heads[1] not in (None, heads[0]):
            yield (
                f"num_key_value_heads is {heads[1]!r}; allowed: {heads[0]!r}, as "
                "num_attention_heads"
            )
        if not isinstance(_read_num_predictors(config), int):
            yield f"{PREDICTORS} is {config[PREDICTORS]!r}; allowed: a number of layers"
    keys = EXPERT_KEYS.get(model_type, {})
    layers = config.get(DENSE_LIST) or []
    if DENSE_LIST in keys.values() and layers != list(range(len(layers))):
        yield f"{DENSE_LIST} is {layers!r}; allowed: only the first layers, for example [0, 1]"
        return
    if keys and _num_dense_layers(config) < config.get("num_hidden_layers", 0):
        yield from (
            f"{key} is missing"
            for key in keys.values()
            if key != DENSE_LIST and _value(config, key) is None
        )


def read_experts(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields of ExpertsConfig that a supported config.json gives, or None if no layer
    has experts.
    """
    model_type = config["model_type"]
    if model_type not in EXPERT_KEYS or _num_dense_layers(config) >= config["num_hidden_layers"]:
        return None
    values = {ours: _value(config, theirs) for ours, theirs in EXPERT_KEYS[model_type].items()}
    return values | FIXED.get(model_type, {}) | {"dense_layers": _num_dense_layers(config)}


def read_latent(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields of LatentConfig that a supported config.json gives, or None."""
    if not has_latent(config["model_type"]):
        return None
    return {ours: config[theirs] for ours, theirs in LATENT_KEYS.items()}


def num_predictors(config: dict[str, Any]) -> int:
    """Return the number of layers behind those of the model that predict further tokens."""
    return _read_num_predictors(config) if has_latent(config["model_type"]) else 0


def is_interleaved(config: dict[str, Any]) -> bool:
    """Return whether the pairs that RoPE rotates are next to each other in the folder's weights."""
    return has_latent(config["model_type"]) and bool(config.get("rope_interleave", True))


def find_obstacles(sizes: ModelSizes, model_type: str) -> Iterator[str]:
    """Yield the reasons for which a model type has no place for the experts or extra depths of a
    model.
    """
    if sizes.predict is not None and model_type != DEEPSEEK:
        yield (
            f"model.predict.depths is {sizes.num_depths}, and {model_type} has no layers that "
            "predict further tokens"
        )
    experts = sizes.experts
    if experts is None:
        return
    fixed = FIXED.get(model_type, {})
    for name, field in ExpertsConfig.model_fields.items():
        allowed = fixed.get(name, field.default)
        value = getattr(experts, name)
        if name not in EXPERT_KEYS[model_type] and value != allowed:
            yield (
                f"model.experts.{name} is {_text(value)}, and {model_type} has only "
                f"{_text(allowed)}"
            )
    if model_type == DEEPSEEK and not experts.shared:
        yield f"model.experts.shared is 0, and {model_type} has at least 1"


def build_mixture_keys(sizes: ModelSizes, model_type: str) -> dict[str, Any]:
    """Return the keys of a config.json that describe experts and latent attention."""
    keys: dict[str, Any] = {}
    if sizes.latent is not None:
        keys = {theirs: getattr(sizes.latent, ours) for ours, theirs in LATENT_KEYS.items()}
        keys |= {"rope_interleave": True, PREDICTORS: sizes.num_depths}
        # A model without experts has only dense layers, also at its extra depths.
        keys["first_k_dense_replace"] = len(sizes.all_layers)
    if sizes.experts is None:
        return keys
    keys |= {
        theirs: getattr(sizes.experts, ours) for ours, theirs in EXPERT_KEYS[model_type].items()
    }
    if model_type == "qwen3_moe":
        keys |= {DENSE_LIST: list(range(sizes.experts.dense_layers)), "decoder_sparse_step": 1}
    if model_type == DEEPSEEK:
        return keys | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    # The model was not balanced by transformers' loss, which is off unless it is asked for.
    return keys | {"router_aux_loss_coef": 0.0}


def _num_dense_layers(config: dict[str, Any]) -> int:
    """Return the number of layers without experts at the beginning."""
    key = EXPERT_KEYS[config["model_type"]].get("dense_layers")
    if key == DENSE_LIST:
        return len(config.get(DENSE_LIST) or [])
    return 0 if key is None else config.get(key) or 0


def _read_num_predictors(config: dict[str, Any]) -> Any:
    return config.get(PREDICTORS) or 0


def _value(config: dict[str, Any], key: str) -> Any:
    value = config.get(key)
    return config.get(OTHER_NAMES.get(key, key)) if value is None else value


def _text(value: object) -> str:
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    )
