"""Folders in Hugging Face's layout: written whole, read by slices, refused with names."""

import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inner.config import DecoderConfig, ModelConfig, WindowConfig
from inner.errors import InputError
from inner.huggingface.file_layout import layout_of_export
from inner.huggingface.files import weights_files, weights_sha256
from inner.huggingface.load import open_weights, read_whole
from inner.huggingface.model_config import fill_sizes_from_folder, read_model_config
from inner.huggingface.save import Export, save_model
from inner.measure.param_specs import param_specs
from inner.mesh import Degrees
from inner.model.sizes import resolve_sizes
from inner.param_spec import ParamSpec
from tests.harness import run_ranks
from tests.inner.folders import BYTE_SIZES, change_config, spread_model, tensors_of, write_folder
from tests.inner.small import SIZES, build_trainer, whole_model
from tests.memory import read_status, reset_peak

TIED = replace(SIZES, tie_embeddings=True)


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path / "out", spread_model())


def rewrite(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces tensors of the folder, by Hugging Face's names with `__` for dots; None takes one
    away.
    """
    values = load_file(folder / "model.safetensors")
    values |= {
        name.replace("__", "."): tensor for name, tensor in tensors.items() if tensor is not None
    }
    gone = {name.replace("__", ".") for name, tensor in tensors.items() if tensor is None}
    save_file(
        {name: tensor for name, tensor in values.items() if name not in gone},
        folder / "model.safetensors",
    )


def error_of(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_whole(folder, param_specs(BYTE_SIZES), BYTE_SIZES)
    return str(caught.value)


def test_tensors_have_the_names_that_transformers_gives_them(folder):
    layer = [
        "input_layernorm",
        "post_attention_layernorm",
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    ]
    layer += [
        f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    ]
    names = [f"model.layers.{number}.{part}.weight" for number in range(2) for part in layer]
    names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert sorted(load_file(folder / "model.safetensors")) == sorted(names)


@pytest.mark.parametrize("shard_bytes", [20_000, 5 * 10**9])
def test_what_is_read_and_written_again_has_the_same_bytes(tmp_path, shard_bytes):
    model = spread_model()
    first = write_folder(tmp_path / "first", model, shard_bytes=shard_bytes)
    again = read_whole(first, param_specs(BYTE_SIZES), BYTE_SIZES)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors_of(model).items())
    save_model(again, Export(BYTE_SIZES, 32, "bytes", shard_bytes=shard_bytes), tmp_path / "second")
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "second").iterdir())
    assert all(
        (first / name).read_bytes() == (tmp_path / "second" / name).read_bytes() for name in names
    )


def test_bfloat16_is_the_nearest_and_survives_the_way_back(tmp_path):
    model = spread_model()
    folder = write_folder(tmp_path / "out", model, "bfloat16")
    read = read_whole(folder, param_specs(BYTE_SIZES), BYTE_SIZES)
    assert all(
        torch.equal(read[name], tensor.bfloat16().float())
        for name, tensor in tensors_of(model).items()
    )
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    save_model(read, Export(BYTE_SIZES, 32, "bytes", "bfloat16"), tmp_path / "again")
    assert weights_sha256(tmp_path / "again") == weights_sha256(folder)


def test_the_hash_is_that_of_the_files_one_after_the_other(tmp_path, folder):
    assert (
        weights_sha256(folder)
        == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    )
    parts = write_folder(tmp_path / "parts", spread_model(), shard_bytes=20_000)
    together = b"".join(path.read_bytes() for path in sorted(parts.glob("model-*.safetensors")))
    assert weights_sha256(parts) == hashlib.sha256(together).hexdigest()


def begin_on_a_rank(
    rank: int, folder: Path, degrees: Degrees, tied: bool
) -> dict[str, torch.Tensor]:
    trainer = build_trainer(degrees, sizes=TIED if tied else SIZES, init_from=folder)
    return whole_model(trainer.params)[0]


@pytest.mark.parametrize(
    ("degrees", "tied"),
    [
        (Degrees(tp=2), False),
        pytest.param(Degrees(dp_shard=2), False, marks=pytest.mark.slow),
        pytest.param(Degrees(pp=2), True, marks=pytest.mark.slow),
    ],
    ids=["tp2", "fsdp2", "pp2-tied"],
)
def test_a_mesh_begins_with_the_folders_weights(tmp_path, degrees, tied):
    model = spread_model(TIED if tied else SIZES)
    folder = write_folder(tmp_path / "out", model)
    for found in run_ranks(begin_on_a_rank, 2, folder, degrees, tied):
        assert found.keys() == tensors_of(model).keys()
        assert all(
            torch.equal(found[name], tensor.view_as(found[name]))
            for name, tensor in tensors_of(model).items()
        )


def test_a_slice_is_read_without_the_rest_of_its_tensor(tmp_path):
    rows, dim = 1 << 25, 16
    header = json.dumps(
        {
            "lm_head.weight": {
                "dtype": "F32",
                "shape": [rows, dim],
                "data_offsets": [0, rows * dim * 4],
            }
        }
    ).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        begin = file.tell()
        file.seek(begin + (rows - 2) * dim * 4)  # A hole of 2 GB, which takes no room.
        file.write(struct.pack(f"<{2 * dim}f", *range(2 * dim)))
    reset_peak()
    before = read_status("VmHWM")
    with open_weights(
        tmp_path, [ParamSpec("head.weight", (rows, dim))], layout_of_export(BYTE_SIZES)
    ) as stored:
        last = stored.read("head.weight", (rows - 1, rows), (3, 5))
    assert last.tolist() == [[19.0, 20.0]]
    assert read_status("VmHWM") - before < 1 << 28


def test_missing_strange_and_misshapen_tensors_are_named_in_one_error(folder):
    rewrite(
        folder,
        model__norm__weight=None,
        model__layers__9__mlp__up_proj__weight=torch.ones(3),
        lm_head__weight=torch.ones(2, 2),
        model__embed_tokens__weight=torch.zeros(260, 32, dtype=torch.int32),
    )
    text = error_of(folder)
    assert "missing: model.norm.weight" in text
    assert "not of this model: model.layers.9.mlp.up_proj.weight" in text
    assert "lm_head.weight has shape (2, 2), not (260, 32)" in text
    assert "model.embed_tokens.weight is I32" in text


def test_a_table_that_follows_from_the_config_may_be_there(folder):
    rewrite(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert len(read_whole(folder, param_specs(BYTE_SIZES), BYTE_SIZES)) == len(
        param_specs(BYTE_SIZES)
    )


def test_values_that_are_not_finite_are_refused_by_name(folder):
    rewrite(folder, model__norm__weight=torch.full((32,), torch.nan))
    assert "model.norm.weight contains values that are not finite" in error_of(folder)


def test_a_cut_file_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "cannot be read as safetensors" in error_of(folder)


def test_weights_in_other_files_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "Only safetensors" in error_of(folder)


def test_an_index_names_files_beside_it_that_are_there(folder):
    index = folder / "model.safetensors.index.json"
    for name, words in (
        ("../model.safetensors", "not the name of a file"),
        ("other.safetensors", "that are missing"),
    ):
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
        with pytest.raises(InputError, match=words):
            weights_files(folder)


SLIDES = {"use_sliding_window": True, "max_window_layers": 0}


@pytest.mark.parametrize(
    "values",
    [
        {
            "attention_bias": None,
            "mlp_bias": None,
            "quantization_config": None,
            "partial_rotary_factor": None,
        },
        {"hidden_act": "swish"},
        {"hidden_act": None},
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": None}},
        {"use_sliding_window": None, "sliding_window": 4},
        {**SLIDES, "sliding_window": 4, "layer_types": ["full_attention", "full_attention"]},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 4},
    ],
)
def test_settings_that_change_nothing_are_read(folder, values: dict[str, Any]):
    change_config(folder, **values)
    assert resolve_sizes(read_model_config(folder), 260) == BYTE_SIZES


@pytest.mark.parametrize(
    ("values", "window"),
    [
        ({**SLIDES, "sliding_window": 16}, WindowConfig(size=16)),
        (
            {
                **SLIDES,
                "sliding_window": 16,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            WindowConfig(size=16, first_layer=1),
        ),
        (
            {
                **SLIDES,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            WindowConfig(size=16, full_every=2),
        ),
        (
            {"model_type": "mistral", "sliding_window": ..., "use_sliding_window": ...},
            WindowConfig(size=4096),
        ),
    ],
)
def test_a_sliding_window_is_read_with_its_layers(
    folder, values: dict[str, Any], window: WindowConfig
):
    change_config(folder, **values)
    assert resolve_sizes(read_model_config(folder), 260).decoder == DecoderConfig(window=window)


def test_a_tied_model_may_have_a_copy_of_its_embedding_as_head(tmp_path):
    folder = write_folder(tmp_path / "out", spread_model(replace(BYTE_SIZES, tie_embeddings=True)))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    sizes = replace(BYTE_SIZES, tie_embeddings=True)
    specs = param_specs(sizes)
    rewrite(folder, lm_head__weight=embedding.clone())
    assert torch.equal(read_whole(folder, specs, sizes)["embed.weight"], embedding)
    changed = embedding.clone()
    changed[-1, -1] += 1
    for head in (changed, embedding.bfloat16(), embedding[:-1].clone()):
        rewrite(folder, lm_head__weight=head)
        with pytest.raises(
            InputError,
            match=r"lm_head\.weight differs from model\.embed_tokens\.weight, but tie_word",
        ):
            read_whole(folder, specs, sizes)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "gpt2"}, "n_embd is missing"),
        ({"model_type": "bloom"}, "model_type is 'bloom'; allowed: llama, mistral, qwen2, qwen3"),
        ({"model_type": "qwen2_moe"}, "model_type is 'qwen2_moe'"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}},
            "rope_type 'longrope'; allowed: default, linear",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "llama3 needs low_freq_factor, high_freq_factor",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: Field required"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0.5}},
            "rope_scaling.factor: Input should be greater",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
            "rope_scaling has truncate False",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "low_freq_factor": 1.0}},
            "does not use low_freq_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
        (
            {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has 'sliding_attention'",
        ),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ({**SLIDES, "sliding_window": "wide"}, "sliding_window is 'wide'"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; allowed: 'silu', 'swish', 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"num_key_value_heads": ...}, "num_key_value_heads is missing"),
        ({"head_dim": "wide"}, "head_dim: got 'wide'"),
        ({"intermediate_size": -1}, "intermediate_size: got -1"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers: got 'two'"),
    ],
)
def test_what_this_model_does_not_compute_is_refused(folder, values: dict[str, Any], words: str):
    change_config(folder, **values)
    with pytest.raises(InputError) as caught:
        read_model_config(folder)
    assert words in str(caught.value) and str(folder) in str(caught.value)


def test_a_config_gives_every_size(folder):
    assert resolve_sizes(read_model_config(folder), 260) == BYTE_SIZES
    change_config(
        folder, rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 77.0}
    )
    assert resolve_sizes(read_model_config(folder), 260) == replace(BYTE_SIZES, rope_theta=77.0)


def test_heads_may_have_a_size_of_their_own(folder):
    change_config(folder, head_dim=16)
    assert resolve_sizes(read_model_config(folder), 260) == replace(BYTE_SIZES, own_head_dim=16)
    change_config(folder, head_dim=...)
    assert resolve_sizes(read_model_config(folder), 260).head_dim == 128  # The default of Qwen3.


def test_the_length_in_pre_training_is_that_of_the_config_unless_the_scaling_says_it(folder):
    for rope_type, given, expected in (("yarn", 16, 16), ("yarn", ..., 32), ("dynamic", 16, 32)):
        scaling = {"rope_type": rope_type, "factor": 2.0, "original_max_position_embeddings": given}
        change_config(
            folder, rope_scaling={key: value for key, value in scaling.items() if value is not ...}
        )
        found = read_model_config(folder).rope_scaling
        assert found is not None and found.original_length == expected


def test_sizes_that_contradict_the_folder_are_refused(folder):
    given = fill_sizes_from_folder(ModelConfig(init_from=str(folder), num_layers=2), folder)
    assert resolve_sizes(given, 260) == BYTE_SIZES and given.init_from == str(folder)
    assert fill_sizes_from_folder(given, folder) == given
    for contradiction in ({"dim": 64}, {"qk_norm": False}, {"preset": "1m"}):
        with pytest.raises(InputError, match=f"model.{next(iter(contradiction))} is"):
            fill_sizes_from_folder(ModelConfig(**contradiction), folder)


def test_an_export_replaces_another_only_when_told_and_nothing_else_ever(folder):
    before, model = weights_sha256(folder), spread_model(seed=4)
    export = Export(BYTE_SIZES, 32, "bytes")
    with pytest.raises(InputError, match="--overwrite"):
        save_model(tensors_of(model), export, folder)
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"thesis\.tex"):
        save_model(tensors_of(model), export, folder, overwrite=True)
    assert weights_sha256(folder) == before
    (folder / "thesis.tex").unlink()
    save_model(tensors_of(model), export, folder, overwrite=True)
    assert weights_sha256(folder) != before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_an_export_that_fails_leaves_what_was_there_and_nothing_of_its_own(folder):
    before = weights_sha256(folder)
    with pytest.raises(InputError, match=r"nowhere\.json"):
        save_model(
            tensors_of(spread_model(seed=4)),
            Export(BYTE_SIZES, 32, "nowhere.json"),
            folder,
            overwrite=True,
        )
    assert weights_sha256(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
