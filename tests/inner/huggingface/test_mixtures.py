"""Mixtures of experts and latent attention: in the hands of transformers, and back."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inner.config import (
    BalanceConfig,
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    ParallelConfig,
    PredictConfig,
)
from inner.errors import InputError
from inner.expert_names import is_router_bias, router_bias_name
from inner.huggingface.load import open_weights, read_layout, read_whole
from inner.huggingface.model_config import fill_sizes_from_folder, read_model_config
from inner.huggingface.model_types import choose_model_type, find_export_obstacles
from inner.huggingface.save import Export, save_model
from inner.measure.param_specs import param_specs
from inner.mesh import Degrees
from inner.model.experts import mixtures
from inner.model.generate import Sampling, generate
from inner.model.single_process import build_whole_model
from inner.model.sizes import PRESETS, ModelSizes, resolve_sizes
from inner.parallel.layout_check import check_layout
from tests.harness import run_ranks
from tests.inner.folders import change_config, spread_model, tensors_of, write_folder
from tests.inner.small import OPTIMIZER, batch, build_trainer, share, whole_model

pytestmark = pytest.mark.slow
LENGTH = 32
QWEN = {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "head_dim": 16,
    "mlp_only_layers": [0], "norm_topk_prob": False, "rope_theta": 1e6,
}  # fmt: skip
OLMOE = {
    "model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40,
    "norm_topk_prob": False, "eos_token_id": 1,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2,
    "intermediate_size": 40, "head_dim": 16
}  # fmt: skip
# With three heads, two ranks share the rows of the middle one; and they share the rows of kv_a that
# RoPE turns.
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_attention_heads": 3, "num_key_value_heads": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4, "topk_group": 2, "q_lora_rank": 24, "kv_lora_rank": 8, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 12, "v_head_dim": 6, "rms_norm_eps": 1e-3,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN,
    "qwen3_moe, renormalised, tied, one key-value head": QWEN | {
        "norm_topk_prob": True, "tie_word_embeddings": True, "mlp_only_layers": [],
        "num_key_value_heads": 1,
        "rope_scaling": YARN | {"mscale": 0.7},
    },
    "olmoe": OLMOE,
    "olmoe, renormalised, tied, no grouped heads": OLMOE | {
        "norm_topk_prob": True, "tie_word_embeddings": True, "num_key_value_heads": 4,
        "num_experts_per_tok": 6,
    },
    "mixtral": MIXTRAL,
    "mixtral, tied, one expert per token": MIXTRAL | {
        "tie_word_embeddings": True, "num_experts_per_tok": 1, "head_dim": None,
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.5},
    },
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, yarn with mscale": DEEPSEEK | {"rope_scaling": YARN | {"mscale": 0.7,
    "mscale_all_dim": 1.3}},
    "deepseek_v3, mscale 0": DEEPSEEK | {"rope_scaling": YARN | {"mscale": 0.0,
    "mscale_all_dim": 0.0}},
    "deepseek_v3, no narrow queries, one group, not renormalised, tied": DEEPSEEK | {
        "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "tie_word_embeddings": True, "n_shared_experts": 1, "v_head_dim": 22,
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3, all layers dense": DEEPSEEK | {"first_k_dense_replace": 3},
    "deepseek_v3, pairs apart": DEEPSEEK | {"rope_interleave": False},
}  # fmt: skip
"""What distinguishes a config.json of each family, at a tiny size."""


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    """Imported when a test asks for it: it takes seconds."""
    import transformers

    return transformers


def tokens(vocab_size: int = 61) -> Tensor:
    return torch.randint(0, vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def make_folder(transformers: ModuleType, out: Path, **keys: Any) -> Any:
    """A model of transformers, saved in `out`, in which every weight matters, and biases of routers
    up to 5.
    """
    common = {
        "vocab_size": 61, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**common | keys)
    ).eval()
    with torch.no_grad():
        for param in theirs.parameters():
            param.add_(0.1 * torch.randn(param.shape))
        for name, buffer in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(10 * torch.rand(buffer.shape) - 5)
    theirs.save_pretrained(out)
    return theirs


def read(folder: Path) -> tuple[ModelSizes, dict[str, Tensor]]:
    sizes = resolve_sizes(read_model_config(folder), 0)
    return sizes, read_whole(folder, param_specs(sizes), sizes)


def assert_same_logits(got: Tensor, expected: Tensor) -> None:
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_that_transformers_saved_computes_the_same_here(transformers, tmp_path, family):
    theirs = make_folder(transformers, tmp_path, **FAMILIES[family])
    ours = build_whole_model(*read(tmp_path), 48, "cpu")
    with torch.no_grad():
        assert_same_logits(ours(tokens()), theirs(tokens()).logits)
    prompt = tokens()[0, :16]
    continued = theirs.generate(
        prompt[None], max_new_tokens=16, do_sample=False, eos_token_id=None
    )[0, 16:]
    generator = torch.Generator()
    assert (
        list(generate(ours, prompt.tolist(), 16, Sampling(temperature=0), generator))
        == continued.tolist()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_comes_back_with_the_same_bytes(transformers, tmp_path, family):
    theirs = make_folder(transformers, tmp_path / "theirs", **FAMILIES[family])
    sizes, weights = read(tmp_path / "theirs")
    save_model(weights, Export(sizes, LENGTH, "bytes"), tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(theirs)
    with torch.no_grad():
        assert_same_logits(again(tokens()).logits, theirs(tokens()).logits)
    stored, returned = (
        load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours")
    )
    assert stored.keys() == returned.keys()
    other = {
        name
        for name in stored
        if stored[name].numpy().tobytes() != returned[name].numpy().tobytes()
    }
    # An export always has the pairs side by side, as DeepSeek's files have them.
    is_apart = FAMILIES[family].get("rope_interleave") is False
    turned = {
        name for name in stored if name.endswith(("q_b_proj.weight", "kv_a_proj_with_mqa.weight"))
    }
    assert other == (turned if is_apart else set())


def test_single_rows_are_read_as_they_are_in_the_whole(transformers, tmp_path):
    make_folder(transformers, tmp_path, **DEEPSEEK)
    sizes, whole = read(tmp_path)
    specs = param_specs(sizes)
    with open_weights(tmp_path, specs, read_layout(tmp_path, sizes)) as stored:
        for spec in specs[:14]:
            num_rows, num_cols = spec.matrix_shape
            matrix = whole[spec.name].view(num_rows, num_cols)
            for row in range(num_rows):
                assert torch.equal(
                    stored.read(spec.name, (row, row + 1), (0, num_cols)), matrix[row : row + 1]
                )


def begin_on_a_rank(
    rank: int, folder: Path, sizes: ModelSizes, degrees: Degrees
) -> dict[str, Tensor]:
    trainer = build_trainer(degrees, sizes=sizes, init_from=folder)
    biases = {
        router_bias_name(mixture.layer): mixture.router.bias
        for mixture in mixtures(trainer.model_parts)
    }
    return whole_model(trainer.params)[0] | biases


@pytest.mark.parametrize("degrees", [Degrees(dp_shard=2), Degrees(pp=2)], ids=["fsdp2", "pp2"])
def test_a_mesh_begins_with_the_folders_mixture(transformers, tmp_path, degrees):
    make_folder(transformers, tmp_path, **DEEPSEEK)
    sizes, whole = read(tmp_path)
    biases: set[str] = set()
    for found in run_ranks(begin_on_a_rank, 2, tmp_path, sizes, degrees):
        assert found.keys() >= {spec.name for spec in param_specs(sizes)}
        assert all(
            torch.equal(tensor, whole[name].view_as(tensor)) for name, tensor in found.items()
        )
        biases |= {name for name in found if is_router_bias(name)}
    assert biases == {router_bias_name(1), router_bias_name(2)}


SHARED = ExpertsConfig(
    number=8, per_token=2, dim=24, shared=1, scores="sigmoid", groups=2, dense_layers=1
)
LATENT = ModelSizes(
    dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    ffn_dim=48,
    vocab_size=260,
    experts=SHARED,
    latent=LatentConfig(q_rank=16, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=8),
)
SOFTMAX = ExpertsConfig(number=6, per_token=2, dim=24, renormalise=False)
ORDINARY = replace(LATENT, latent=None, num_kv_heads=2, experts=SOFTMAX)
TYPES = {
    "deepseek_v3": LATENT,
    "qwen3_moe": replace(
        ORDINARY, qk_norm=True, experts=SOFTMAX.model_copy(update={"dense_layers": 1})
    ),
    "olmoe": replace(ORDINARY, qk_norm="whole"),
    "mixtral": replace(ORDINARY, experts=SOFTMAX.model_copy(update={"renormalise": True})),
}


def train_on_a_rank(
    rank: int, sizes: ModelSizes, balance: BalanceConfig
) -> tuple[dict[str, Tensor], Tensor]:
    """The weights after four steps, and the logits with them."""
    trainer = build_trainer(Degrees(), sizes, OPTIMIZER.model_copy(update={"balance": balance}))
    for step in range(4):
        trainer.step(share(trainer, batch(step)))
    (model,) = trainer.model_parts
    biases = {router_bias_name(mixture.layer): mixture.router.bias for mixture in mixtures([model])}
    whole = {spec.name: spec.shape for spec in trainer.params.specs}
    held = {
        part.name: trainer.params.read(i).view(whole[part.name])
        for i, part in enumerate(trainer.params.slices)
    }
    with torch.no_grad():
        return held | biases, model(tokens(260)[:, :16])


@pytest.mark.parametrize("model_type", TYPES)
def test_a_mixture_that_was_trained_computes_the_same_in_transformers(
    transformers, tmp_path, model_type
):
    sizes = TYPES[model_type]
    assert choose_model_type(sizes) == model_type
    has_biases = model_type == "deepseek_v3"
    balance = BalanceConfig(bias_speed=0.3 if has_biases else 0.0, sequence_loss=0.01)
    ((weights, expected),) = run_ranks(train_on_a_rank, 1, sizes, balance)
    assert (
        any(tensor.any() for name, tensor in weights.items() if is_router_bias(name)) is has_biases
    )
    save_model(weights, Export(sizes, LENGTH, "bytes"), tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert_same_logits(theirs(tokens(260)[:, :16]).logits, expected)


def test_biases_stay_in_fp32_in_an_export_as_bfloat16(transformers, tmp_path):
    make_folder(transformers, tmp_path / "theirs", **DEEPSEEK)
    sizes, weights = read(tmp_path / "theirs")
    save_model(weights, Export(sizes, LENGTH, "bytes", "bfloat16"), tmp_path / "ours")
    stored, returned = (
        load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours")
    )
    for name, tensor in returned.items():
        if name.endswith("e_score_correction_bias"):
            assert torch.equal(tensor, stored[name]) and tensor.dtype == torch.float32
        else:
            assert torch.equal(tensor, stored[name].bfloat16())


def test_layers_that_predict_further_tokens_are_left_out_with_a_warning(
    transformers, tmp_path, caplog
):
    make_folder(transformers, tmp_path / "theirs", **DEEPSEEK)
    with caplog.at_level(logging.WARNING):
        _, before = read(tmp_path / "theirs")
    assert caplog.text == ""
    path = tmp_path / "theirs" / "model.safetensors"
    predictor = {
        "model.layers.3.eh_proj.weight": torch.ones(48, 96),
        "model.layers.3.enorm.weight": torch.ones(48),
    }
    save_file(load_file(path) | predictor, path)
    with caplog.at_level(logging.WARNING):
        sizes, weights = read(tmp_path / "theirs")
    assert (
        "2 tensors of layers that predict further tokens (num_nextn_predict_layers) are left out"
        in caplog.text
    )
    assert weights.keys() == before.keys() and all(
        torch.equal(weights[name], before[name]) for name in before
    )
    save_model(weights, Export(sizes, LENGTH, "bytes"), tmp_path / "ours")
    assert (
        json.loads((tmp_path / "ours" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    )
    change_config(tmp_path / "theirs", num_nextn_predict_layers=0)
    with pytest.raises(InputError, match=r"not of this model: model\.layers\.3\.eh_proj\.weight"):
        read(tmp_path / "theirs")


PREDICTING = {
    "experts": replace(PRESETS["1m-experts"], predict=PredictConfig(depths=2)),
    "experts, tied": replace(
        PRESETS["1m-experts"], tie_embeddings=True, predict=PredictConfig(depths=1)
    ),
    "all layers dense": replace(
        PRESETS["1m-experts"], experts=None, predict=PredictConfig(depths=1)
    ),
}


@pytest.mark.parametrize("kind", PREDICTING)
def test_layers_that_predict_further_tokens_come_back_with_the_same_bytes(tmp_path, kind):
    sizes = PREDICTING[kind]
    tensors = tensors_of(spread_model(sizes))
    biases = {router_bias_name(layer): torch.rand(16) for layer in sizes.expert_layers}
    assert sizes.experts is None or max(sizes.expert_layers) == max(sizes.predicting_layers)
    save_model(tensors | biases, Export(sizes, LENGTH, "bytes"), tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    table = stored["model.embed_tokens.weight"]
    head = table if sizes.tie_embeddings else stored["lm_head.weight"]
    for layer in sizes.predicting_layers:
        name = f"model.layers.{layer}."
        assert torch.equal(
            stored[name + "eh_proj.weight"], tensors[f"layers.{layer}.joint.proj.weight"]
        )
        assert torch.equal(
            stored[name + "enorm.weight"], tensors[f"layers.{layer}.joint.token_norm.weight"]
        )
        assert torch.equal(
            stored[name + "hnorm.weight"], tensors[f"layers.{layer}.joint.stream_norm.weight"]
        )
        assert torch.equal(
            stored[name + "shared_head.norm.weight"], tensors[f"layers.{layer}.joint.norm.weight"]
        )
        assert torch.equal(stored[name + "embed_tokens.weight"], table)
        assert torch.equal(stored[name + "shared_head.head.weight"], head)
        assert name + "self_attn.kv_b_proj.weight" in stored
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == sizes.num_depths
    given = fill_sizes_from_folder(ModelConfig(predict=sizes.predict), tmp_path / "out")
    again = resolve_sizes(given, 0)
    assert again.predict == sizes.predict
    read_back = read_whole(tmp_path / "out", param_specs(again), again)
    assert read_back.keys() == (tensors | biases).keys()
    assert all(torch.equal(read_back[name], tensor) for name, tensor in (tensors | biases).items())
    save_model(read_back, Export(again, LENGTH, "bytes"), tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


def test_transformers_takes_a_model_with_extra_depths_and_computes_it_without_them(
    transformers, tmp_path
):
    sizes = PREDICTING["experts"]
    tensors = tensors_of(spread_model(sizes))
    save_model(tensors, Export(sizes, LENGTH, "bytes"), tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(theirs.model.layers) == sizes.num_layers
    ours = build_whole_model(sizes, tensors, LENGTH, "cpu")
    with torch.no_grad():
        assert_same_logits(ours(tokens()), theirs(tokens()).logits)


def test_extra_depths_that_a_folder_or_a_model_type_does_not_have_are_refused(tmp_path):
    sizes = PREDICTING["experts"]
    folder = write_folder(tmp_path / "out", spread_model(sizes))
    for depths, words in ((3, "set it to 2 or less"), (2, ""), (1, "")):
        given = ModelConfig(predict=PredictConfig(depths=depths))
        if words:
            with pytest.raises(
                InputError, match=f"model.predict.depths is {depths}, but .* has 2 layers .*{words}"
            ):
                fill_sizes_from_folder(given, folder)
        else:
            fewer = resolve_sizes(fill_sizes_from_folder(given, folder), 0)
            assert read_whole(folder, param_specs(fewer), fewer).keys() >= {
                spec.name for spec in param_specs(fewer)
            }
    change_config(folder, num_nextn_predict_layers=0)
    with pytest.raises(InputError, match=r"has 0 layers .*leave model\.predict out"):
        fill_sizes_from_folder(ModelConfig(predict=PredictConfig(depths=1)), folder)
    words = "model.predict.depths is 1, and mixtral has no layers that predict further tokens"
    assert words in export_error(
        replace(TYPES["mixtral"], predict=PredictConfig(depths=1)), tmp_path / "refused"
    )
    dense = replace(ORDINARY, experts=None, predict=PredictConfig(depths=1))
    assert "and llama has no layers" in export_error(dense, tmp_path / "refused")


def test_an_own_table_of_a_depth_is_refused_by_name(tmp_path):
    sizes = PREDICTING["all layers dense"]
    folder = write_folder(tmp_path / "out", spread_model(sizes))
    path = folder / "model.safetensors"
    stored = load_file(path)
    copy = "model.layers.4.shared_head.head.weight"
    save_file(stored | {copy: stored[copy] + 1}, path)
    with pytest.raises(
        InputError,
        match=r"model\.layers\.4\.shared_head\.head\.weight differs from lm_head\.weight",
    ):
        read_whole(folder, param_specs(sizes), sizes)


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        (QWEN, {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; allowed: 1"),
        (
            QWEN,
            {"mlp_only_layers": [1]},
            "mlp_only_layers is [1]; allowed: only the first layers, for example [0, 1]",
        ),
        (QWEN, {"num_local_experts": ...}, "num_experts is missing"),
        (QWEN, {"norm_topk_prob": ...}, "norm_topk_prob is missing"),
        (
            QWEN,
            {"num_experts_per_tok": 9},
            "per_token (9) is more than the 8 experts of the kept groups",
        ),
        (QWEN, {"moe_intermediate_size": 20}, "dim (20) must be a multiple of 8"),
        (QWEN, {"num_experts_per_tok": "three"}, "num_experts_per_tok: got 'three'"),
        (QWEN, {"attention_bias": True}, "attention_bias is True; allowed: False"),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv is 8.0; allowed: None"),
        (MIXTRAL, {"sliding_window": 0}, "sliding_window is 0"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func is 'softmax'; allowed: 'sigmoid'"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method is 'greedy'; allowed: 'noaux_tc'"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq is 2; allowed: 1"),
        (
            DEEPSEEK,
            {"num_key_value_heads": 1},
            "num_key_value_heads is 1; allowed: 3, as num_attention_heads",
        ),
        (DEEPSEEK, {"q_lora_rank": ...}, "q_lora_rank is missing"),
        (DEEPSEEK, {"kv_lora_rank": "wide"}, "kv_lora_rank: got 'wide'"),
        (DEEPSEEK, {"topk_group": ...}, "topk_group is missing"),
        (
            DEEPSEEK,
            {"num_nextn_predict_layers": "one"},
            "num_nextn_predict_layers is 'one'; allowed: a number",
        ),
        (
            DEEPSEEK,
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is {'quant_method': 'fp8'}",
        ),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(
    transformers, tmp_path, family, values, words
):
    config = transformers.AutoConfig.for_model(
        vocab_size=61, hidden_size=48, num_hidden_layers=3, max_position_embeddings=64,
        **{"num_attention_heads": 4}
        | {"num_key_value_heads": 2, "intermediate_size": 56} | family
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    read_model_config(tmp_path)
    change_config(tmp_path, **values)
    with pytest.raises(InputError) as caught:
        read_model_config(tmp_path)
    assert words in str(caught.value) and str(tmp_path) in str(caught.value)


def export_error(sizes: ModelSizes, out: Path, biases: dict[str, Tensor] | None = None) -> str:
    model = spread_model(sizes)
    with pytest.raises(InputError) as caught:
        save_model(tensors_of(model) | (biases or {}), Export(sizes, LENGTH, "bytes"), out)
    assert not out.exists()
    return str(caught.value)


def test_a_mixture_that_no_model_type_computes_is_not_exported(tmp_path):
    for changes, words in (
        ({"capacity": 2.0}, "model.experts.capacity is 2.0, and mixtral has only null"),
        ({"renormalise": False}, "model.experts.renormalise is false, and mixtral has only true"),
        ({"groups": 3}, "model.experts.groups is 3, and mixtral has only 1"),
        ({"scores": "sigmoid"}, "model.experts.scores is sigmoid, and mixtral has only softmax"),
        ({"shared": 1}, "model.experts.shared is 1, and mixtral has only 0"),
        ({"dense_layers": 1}, "model.experts.dense_layers is 1, and mixtral has only 0"),
    ):
        experts = SOFTMAX.model_copy(update={"renormalise": True} | changes)
        assert words in export_error(replace(ORDINARY, experts=experts), tmp_path / "out")
    softmax = replace(LATENT, experts=SHARED.model_copy(update={"scores": "softmax", "shared": 0}))
    text = export_error(softmax, tmp_path / "out")
    assert "scores is softmax, and deepseek_v3 has only sigmoid" in text
    assert "shared is 0, and deepseek_v3 has at least 1" in text


def test_biases_that_a_model_type_does_not_have_are_not_exported(tmp_path):
    biases = {router_bias_name(layer): torch.zeros(6) for layer in range(2)}
    sizes = TYPES["mixtral"]
    save_model(
        tensors_of(spread_model(sizes)) | biases, Export(sizes, LENGTH, "bytes"), tmp_path / "zeros"
    )
    biases[router_bias_name(1)][3] = -0.25
    text = export_error(sizes, tmp_path / "out", biases)
    assert (
        "biases chose its experts (up to 0.25), and mixtral has none" in text
        and "bias_speed=0" in text
    )


def test_what_keeps_a_model_from_an_export_is_known_before_it_trains():
    assert find_export_obstacles(TYPES["deepseek_v3"], 0.001) == []
    assert find_export_obstacles(TYPES["olmoe"], 0.0) == []
    (obstacle,) = find_export_obstacles(TYPES["olmoe"], 0.001)
    assert obstacle.startswith(
        "optimizer.balance.bias_speed is 0.001, and routers of olmoe have no biases"
    )
    (obstacle,) = find_export_obstacles(
        replace(LATENT, experts=SHARED.model_copy(update={"capacity": 1.5})), 0.001
    )
    assert obstacle == "model.experts.capacity is 1.5, and deepseek_v3 has only null"


def test_attention_that_no_mixture_of_transformers_has_is_refused_before_it_trains():
    given = ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"qkv_bias": True, "experts": SOFTMAX}, "qkv_bias is true with model.experts"),
    ]
    for change, words in changes:
        with pytest.raises(InputError, match=words):
            resolve_sizes(given.model_copy(update=change), 61)
    with pytest.raises(
        InputError, match=r"island\.mesh\.tp \(2\): model\.qk_norm whole norms all heads together"
    ):
        check_layout(replace(TYPES["olmoe"], experts=None), Degrees(tp=2), ParallelConfig(), 16, 1)


def test_dense_weights_and_those_of_a_mixture_are_not_taken_for_each_other(transformers, tmp_path):
    make_folder(transformers, tmp_path / "dense", model_type="qwen3", head_dim=16)
    make_folder(transformers, tmp_path / "mixture", **QWEN)
    with pytest.raises(InputError, match=r"has no experts .*leave model\.experts out"):
        fill_sizes_from_folder(ModelConfig(experts=SOFTMAX), tmp_path / "dense")
    configs = {name: (tmp_path / name / "config.json").read_text() for name in ("dense", "mixture")}
    (tmp_path / "dense" / "config.json").write_text(configs["mixture"])
    (tmp_path / "mixture" / "config.json").write_text(configs["dense"])
    with pytest.raises(
        InputError, match=r"its tensors are those of a dense model, but .* is a mixture of experts"
    ):
        read(tmp_path / "dense")
    with pytest.raises(
        InputError, match=r"its tensors are those of a mixture of experts, but .* is dense"
    ):
        read(tmp_path / "mixture")


def test_tensors_with_all_experts_are_refused_by_name(transformers, tmp_path):
    make_folder(transformers, tmp_path, **QWEN)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    fused = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    save_file(fused | {"model.layers.1.mlp.experts.gate_up_proj": torch.ones(8, 48, 48)}, path)
    with pytest.raises(
        InputError, match=r"layers\.1\.mlp\.experts\.gate_up_proj: holds a matrix of all .*save_pre"
    ):
        read(tmp_path)
