"""Model sizes: exact counts and the errors a user meets."""

import subprocess
import sys

import pytest
import torch

from inner.config import ModelConfig
from inner.errors import InputError
from inner.measure.param_specs import num_active, num_elements, param_specs
from inner.model.sizes import PRESETS, resolve_sizes
from inner.model.transformer import Transformer


@pytest.mark.parametrize("name", PRESETS)
def test_closed_form_counts_the_model_exactly(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(PRESETS[name], torch.arange(8))
    assert num_elements(param_specs(PRESETS[name])) == sum(
        param.numel() for param in model.parameters()
    )


@pytest.mark.parametrize(
    ("name", "count"), [("1b", 1_235_814_400), ("3b", 3_212_749_824), ("8b", 8_030_261_248)]
)
def test_llama_presets_have_the_published_counts(name: str, count: int) -> None:
    assert num_elements(param_specs(PRESETS[name])) == count


@pytest.mark.parametrize(
    ("name", "count", "active"),
    [
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
        ("deepseek-v3", 671_026_404_352, 37_552_282_624),
        ("8b", 8_030_261_248, 8_030_261_248),
        ("1b", 1_235_814_400, 1_235_814_400),
    ],
)
def test_a_token_uses_the_published_number_of_parameters(
    name: str, count: int, active: int
) -> None:
    assert num_elements(param_specs(PRESETS[name])) == count
    assert num_active(PRESETS[name]) == active


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("m")])
def test_small_presets_are_about_their_name(name: str) -> None:
    assert num_elements(param_specs(PRESETS[name])) == pytest.approx(int(name[:-1]) * 1e6, rel=0.06)


def test_closed_form_counts_biases_and_heads_of_their_own_size() -> None:
    sizes = resolve_sizes(ModelConfig(preset="1m", qkv_bias=True, head_dim=48), vocab_size=300)
    assert num_elements(param_specs(sizes)) == sum(
        param.numel() for param in Transformer(sizes, torch.arange(8)).parameters()
    )


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_closed_form_counts_qk_norm_and_tied_embeddings(tie_embeddings: bool) -> None:
    config = ModelConfig(preset="1m", qk_norm=True, tie_embeddings=tie_embeddings)
    sizes = resolve_sizes(config, vocab_size=300)
    assert num_elements(param_specs(sizes)) == sum(
        param.numel() for param in Transformer(sizes, torch.arange(8)).parameters()
    )


def test_named_sizes_win_over_the_preset() -> None:
    sizes = resolve_sizes(ModelConfig(preset="1m", num_layers=7, rope_theta=3.0), vocab_size=999)
    assert (sizes.num_layers, sizes.rope_theta, sizes.vocab_size) == (7, 3.0, 999)
    assert sizes.dim == PRESETS["1m"].dim


def test_preset_keeps_its_own_rope_theta() -> None:
    assert resolve_sizes(ModelConfig(preset="8b"), vocab_size=260).rope_theta == 500000.0


def test_sizes_without_a_preset_suffice() -> None:
    config = ModelConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=128)
    assert resolve_sizes(config, vocab_size=260).head_dim == 16


def expect_error(config: ModelConfig, *parts: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve_sizes(config, vocab_size=260)
    for part in parts:
        assert part in str(caught.value)


def test_unknown_preset_lists_the_choices_and_names_the_nearest() -> None:
    expect_error(ModelConfig(preset="8B "), "'8B '", "nearest is '8b'", ", ".join(PRESETS))


def test_no_preset_names_what_is_missing() -> None:
    expect_error(
        ModelConfig(dim=64, num_heads=4), "num_layers, num_kv_heads, ffn_dim", "model.preset", "1m"
    )


def test_heads_that_do_not_cut_dim_name_a_dim_that_works() -> None:
    expect_error(
        ModelConfig(preset="1m", num_heads=6), "model.dim (128)", "num_heads (6)", "120 or 132"
    )


def test_heads_of_an_odd_size_name_a_size_that_works() -> None:
    expect_error(ModelConfig(preset="1m", head_dim=33), "model.head_dim (33)", "32 or 34")


def test_what_could_not_be_exported_is_refused_before_it_is_trained() -> None:
    expect_error(
        ModelConfig(preset="1m", qk_norm=True, qkv_bias=True),
        "model.qk_norm and model.qkv_bias",
        "exported",
    )


def test_key_value_heads_that_do_not_divide_name_those_that_do() -> None:
    expect_error(
        ModelConfig(preset="1m", num_kv_heads=3), "num_kv_heads (3)", "try num_kv_heads 1, 2, 4"
    )


def test_vocabulary_smaller_than_the_tokenizer_is_refused() -> None:
    expect_error(ModelConfig(preset="1m", vocab_size=200), "model.vocab_size (200)", "260")


def test_presets_and_mesh_import_no_torch() -> None:
    code = "import sys, inner.model.sizes, inner.mesh; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
