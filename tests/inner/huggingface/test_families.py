"""Families of decoders: what transformers saved computes the same here, and comes back with the
same bytes.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inner.config import DecoderConfig, WindowConfig
from inner.errors import InputError
from inner.huggingface.load import read_whole
from inner.huggingface.model_config import read_model_config
from inner.huggingface.model_types import ATTEMPTS, choose_model_type, find_export_obstacles
from inner.huggingface.save import Export, save_model
from inner.huggingface.type_table import MODEL_TYPES
from inner.measure.param_specs import param_specs
from inner.model.generate import last_logits
from inner.model.single_process import build_whole_model
from inner.model.sizes import ModelSizes, resolve_sizes
from tests.inner.folders import BYTE_SIZES, change_config, spread_model, tensors_of, write_folder

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, **IDS}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
STRETCHED = {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e4}
HALF_TURNED = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
FALCON = {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral 0.1": {"model_type": "mistral", "sliding_window": 5, "head_dim": 12},
    "qwen2, windows in upper layers": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5,
        "max_window_layers": 1
    },
    "qwen3 with windows": {
        "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 5,
        "max_window_layers": 0, "head_dim": 16
    },
    "llama with all biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True,
    "hidden_act": "gelu"},
    "olmo2": {"model_type": "olmo2", **IDS},
    "olmo3": {"model_type": "olmo3", "sliding_window": 5, "num_hidden_layers": 5, **IDS},
    "phi3": {"model_type": "phi3", "sliding_window": 7, **IDS},
    "phi3, half of a head turns": {"model_type": "phi3", "rope_parameters": HALF_TURNED, **IDS},
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2", "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5,
    },
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 5,
        "query_pre_attn_scalar": 20,
        "num_hidden_layers": 7,
        "rope_parameters": {"full_attention": STRETCHED, "sliding_attention": LOCAL},
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5, "no_rope_layer_interval": 2,
    **IDS},
    "gpt_neox": {"model_type": "gpt_neox", "rope_parameters": HALF_TURNED},
    "gpt_neox, one after the other": {
        "model_type": "gpt_neox", "use_parallel_residual": False, "attention_bias": False,
        "rope_parameters": HALF_TURNED,
    },
    "gpt2": GPT2,
    "gpt2, untied": GPT2 | {"n_inner": 70, "activation_function": "gelu",
    "tie_word_embeddings": False},
    "cohere": {"model_type": "cohere", "logit_scale": 0.3, "attention_bias": True, **IDS},
    "falcon 7b": {"model_type": "falcon", "ffn_hidden_size": 70},
    "falcon 40b": FALCON | {"bias": True},
    "falcon 11b": FALCON | {"num_ln_in_parallel_attn": 1},
    "falcon, one after the other": {
        "model_type": "falcon", "parallel_attn": False, "multi_query": False, "bias": True
    },
    "mpt": {"model_type": "mpt", "d_model": 48, "n_layers": 3, "n_heads": 4, "max_seq_len": 64},
}  # fmt: skip
"""What distinguishes a config.json of each family, at a tiny size. Sequences are of 32 tokens."""


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    """Imported when a test asks for it: it takes seconds."""
    import transformers

    return transformers


def make_folder(transformers: ModuleType, out: Path, family: str) -> Any:
    """A model of transformers, saved in `out`, in which every weight matters."""
    common = {
        "vocab_size": 61, "hidden_size": 48, "intermediate_size": 50, "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**common | FAMILIES[family])
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for param in theirs.parameters():
            param.add_(0.1 * torch.randn(param.shape))
    theirs.save_pretrained(out)
    return theirs


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_the_same_here_and_comes_back_with_the_same_bytes(
    transformers, tmp_path, family
):
    theirs = make_folder(transformers, tmp_path / "theirs", family)
    sizes = resolve_sizes(read_model_config(tmp_path / "theirs"), 0)
    weights = read_whole(tmp_path / "theirs", param_specs(sizes), sizes)
    ours = build_whole_model(sizes, weights, 32, "cpu")
    tokens = torch.randint(0, 61, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (ours(tokens) - expected).abs().max() < 1e-5 < expected.abs().max()
    save_model(weights, Export(sizes, 32, "bytes"), tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    stored, returned = (
        load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours")
    )
    assert stored.keys() == returned.keys()
    assert all(
        stored[name].numpy().tobytes() == returned[name].numpy().tobytes() for name in stored
    )
    with torch.no_grad():
        assert type(again) is type(theirs) and torch.equal(again(tokens).logits, expected)
    assert resolve_sizes(read_model_config(tmp_path / "ours"), 0) == sizes


MADE: dict[str, ModelSizes] = {
    "mistral": replace(
        BYTE_SIZES, qk_norm=False, decoder=DecoderConfig(window=WindowConfig(size=5))
    ),
    "qwen2": replace(
        BYTE_SIZES,
        qk_norm=False,
        qkv_bias=True,
        decoder=DecoderConfig(window=WindowConfig(size=5, first_layer=1)),
    ),
    "olmo2": replace(BYTE_SIZES, qk_norm="whole", decoder=DecoderConfig(norm_place="after")),
    "phi3": replace(BYTE_SIZES, qk_norm=False, decoder=DecoderConfig(rotary_dim=4)),
    "gemma2": replace(
        BYTE_SIZES,
        qk_norm=False,
        decoder=DecoderConfig(
            norm="rms_plus_one",
            norm_place="both",
            activation="gelu_tanh",
            window=WindowConfig(size=5, full_every=2),
            query_dim=9,
            score_cap=2.0,
            logit_cap=3.0,
            embed_scale=BYTE_SIZES.dim**0.5,
        ),
    ),
    "smollm3": replace(BYTE_SIZES, qk_norm=False, decoder=DecoderConfig(no_rope_every=2)),
    "gpt_neox": replace(
        BYTE_SIZES,
        qk_norm=False,
        qkv_bias=True,
        num_kv_heads=4,
        decoder=DecoderConfig(
            norm="layer",
            parallel="two_norms",
            activation="relu2",
            gated=False,
            out_bias=True,
            ffn_bias=True,
            rotary_dim=2,
        ),
    ),
    "gpt2": replace(
        BYTE_SIZES,
        qk_norm=False,
        qkv_bias=True,
        num_kv_heads=4,
        decoder=DecoderConfig(
            norm="layer",
            activation="gelu_tanh",
            gated=False,
            out_bias=True,
            ffn_bias=True,
            positions="learned",
            max_positions=40,
        ),
    ),
    "cohere": replace(
        BYTE_SIZES,
        qk_norm=False,
        decoder=DecoderConfig(norm="layer_unbiased", parallel="one_norm", logit_scale=0.3),
    ),
    "falcon": replace(
        BYTE_SIZES,
        qk_norm=False,
        decoder=DecoderConfig(norm="layer", parallel="two_norms", activation="gelu", gated=False),
    ),
    "mpt": replace(
        BYTE_SIZES,
        qk_norm=False,
        num_kv_heads=4,
        ffn_dim=128,
        decoder=DecoderConfig(
            norm="layer_unbiased", activation="gelu", gated=False, positions="alibi"
        ),
    ),
}
"""A model that was trained here, for each way in which a type names and arranges tensors."""


@pytest.mark.parametrize("model_type", MADE)
def test_an_export_is_read_as_the_same_model(tmp_path, model_type):
    sizes = MADE[model_type]
    assert choose_model_type(sizes) == model_type
    model = spread_model(sizes)
    folder = write_folder(tmp_path / "out", model)
    found = resolve_sizes(read_model_config(folder), 260)
    assert replace(found, model_type=None) == sizes
    again = read_whole(folder, param_specs(sizes), sizes)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors_of(model).items())


@pytest.mark.parametrize("model_type", MADE)
def test_generation_computes_the_logits_of_the_whole_sequence(model_type):
    model = spread_model(MADE[model_type])
    tokens = torch.randint(0, 260, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens)[:, -1]
        assert (last_logits(model, tokens, 0) - expected).abs().max() < 1e-5
        shifted = last_logits(model, tokens[:, 1:], 1)
    # Positions count from the place of the first token; only relative ones change nothing.
    knows_places = MADE[model_type].decoder.positions == "learned"
    assert knows_places == bool((shifted - last_logits(model, tokens[:, 1:], 0)).abs().max() > 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MADE)
def test_an_export_gives_the_same_logits_in_transformers(transformers, tmp_path, model_type):
    ours = spread_model(MADE[model_type])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(write_folder(tmp_path / "out", ours))
    assert type(theirs).__name__ == MODEL_TYPES[model_type].architecture
    tokens = torch.randint(0, 260, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-5


def test_the_first_files_of_gpt2_are_read(tmp_path):
    sizes = MADE["gpt2"]
    folder = write_folder(tmp_path / "out", spread_model(sizes))
    stored = load_file(folder / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    save_file(old | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, folder / "model.safetensors")
    assert read_whole(folder, param_specs(sizes), sizes).keys() == {
        spec.name for spec in param_specs(sizes)
    }


@pytest.mark.parametrize(
    ("model_type", "values", "words"),
    [
        (
            "mistral",
            {"sliding_window": "wide"},
            "sliding_window is 'wide'; allowed: a number of tokens",
        ),
        ("mistral", {"hidden_act": "tanh"}, "hidden_act is 'tanh'; allowed: 'silu'"),
        (
            "qwen2",
            {"layer_types": ["chunked_attention", "full_attention"]},
            "layer_types has 'chunked_attention'",
        ),
        (
            "gemma2",
            {
                "num_hidden_layers": 4,
                "layer_types": [
                    f"{kind}_attention" for kind in ("sliding", "full", "full", "sliding")
                ],
            },
            "layer_types is .*; allowed: a window in all layers from one on",
        ),
        (
            "gemma2",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is True; allowed: False",
        ),
        (
            "gemma2",
            {"attn_logit_softcapping": -1.0},
            "score_cap: got -1.0|Input should be greater than 0",
        ),
        ("phi3", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
        (
            "phi3",
            {"rope_parameters": {"partial_rotary_factor": 0.4}},
            "rotary_dim is 3; RoPE turns pairs",
        ),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 0], "num_hidden_layers": 4}, "no_rope_layers is"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window is True; allowed: False"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm is True; allowed: False"),
        ("falcon", {"alibi": True}, "alibi is True; allowed: False"),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx is True",
        ),
        ("mpt", {"attn_config": {"clip_qkv": 8.0}}, "attn_config.clip_qkv is 8.0; allowed: None"),
        ("mpt", {"n_heads": 6}, "n_heads is 6; allowed: powers of two"),
        ("olmo2", {"model_type": "bloom"}, "model_type is 'bloom'; allowed: llama, mistral"),
    ],
)
def test_what_a_family_does_not_compute_here_is_refused_by_name(
    tmp_path, model_type, values, words
):
    folder = write_folder(tmp_path / "out", spread_model(MADE[model_type]))
    change_config(folder, **values)
    with pytest.raises(InputError, match=words):
        read_model_config(folder)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            replace(MADE["mpt"], num_kv_heads=2),
            "num_kv_heads is 2, and mpt has only as many as num_heads",
        ),
        (replace(MADE["gpt2"], qkv_bias=False), "model.qkv_bias is false, and gpt2 has only true"),
        (
            replace(
                MADE["gemma2"],
                decoder=MADE["gemma2"].decoder.model_copy(update={"embed_scale": 2.0}),
            ),
            "model.decoder.embed_scale is 2.0, and gemma2 has only 5.65",
        ),
        (
            replace(
                MADE["smollm3"],
                decoder=DecoderConfig(no_rope_every=2, positions="rope", score_cap=2.0),
            ),
            "model.decoder.score_cap is 2.0, and smollm3 has only null",
        ),
    ],
)
def test_a_decoder_that_no_model_type_computes_is_not_exported(sizes, words):
    with pytest.raises(InputError, match=re.escape(words)):
        choose_model_type(sizes)
    assert any(words in obstacle for obstacle in find_export_obstacles(sizes, 0.0))


def test_a_folder_keeps_its_type_where_another_would_arrange_tensors_otherwise(tmp_path):
    sizes = replace(MADE["mistral"], model_type="phi3")
    folder = write_folder(tmp_path / "out", spread_model(sizes))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "phi3"
    assert resolve_sizes(read_model_config(folder), 260) == sizes


def test_the_documentation_lists_every_model_type():
    text = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    (table,) = re.findall(r"\| model type \|.*\n((?:\|.*\n)+)", text)
    listed = re.findall(
        r"`([a-z0-9_]+)`", "".join(line.split("|")[1] for line in table.splitlines())
    )
    assert sorted(listed) == sorted(MODEL_TYPES)
    assert set(ATTEMPTS) <= set(listed)
