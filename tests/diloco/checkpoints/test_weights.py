"""Weights in and out of runs: what a config takes from a folder, and what is done with a folder's
weights.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from diloco.checkpoints.weights import (
    GenerateRequest,
    Weights,
    evaluate,
    generate_texts,
    load_heldout_text,
    load_text,
    open_weights,
)
from diloco.cli.main import app
from diloco.config.init_weights import pin_weights_hash
from diloco.config.schema import Config, dump_config, load_config, parse_config
from diloco.connections import check_same_run
from diloco.errors import ConfigError
from inner.config import DecoderConfig, WindowConfig
from inner.errors import InputError
from inner.huggingface.files import weights_sha256
from inner.model.generate import Sampling
from inner.model.sizes import resolve_sizes
from tests.inner.folders import BYTE_SIZES, change_config, spread_model, write_folder

TEXT = "The quick brown fox jumps over the lazy dog. " * 9


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path / "weights", spread_model())


def config_from(tmp_path: Path, folder: Path, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{init_from: {folder}}}\n")
    return load_config(path, overrides)


def test_a_config_has_the_sizes_and_the_hash_of_its_first_weights(tmp_path, folder):
    config = pin_weights_hash(config_from(tmp_path, folder))
    assert resolve_sizes(config.model, 260) == BYTE_SIZES
    assert config.model.init_sha256 == weights_sha256(folder)
    (tmp_path / "kept.yaml").write_text(dump_config(config))
    assert pin_weights_hash(load_config(tmp_path / "kept.yaml")) == config


def test_a_runs_folder_does_not_say_which_code_is_imported_to_read_its_text(tmp_path):
    text = [
        "data.source=tests.own.sources:Tables",
        "data.options={numbers: 500}",
        f"island.cache_dir={tmp_path}",
    ]
    config = parse_config("model: {preset: 1m}", text)
    weights = Weights(BYTE_SIZES, {}, 8, "bytes", config.run, config.island)
    with pytest.raises(ConfigError, match=r"add --allow-import tests\.own\.sources:Tables"):
        load_heldout_text(weights)
    assert len(load_heldout_text(weights, ["tests.own.sources"]).texts[0].heldout) > 0


def test_islands_with_other_weights_are_refused_by_the_key_that_differs(tmp_path, folder):
    ours = pin_weights_hash(config_from(tmp_path, folder)).run
    write_folder(tmp_path / "other", spread_model(seed=4))
    theirs = pin_weights_hash(
        config_from(tmp_path, folder, f"island.init_from={tmp_path / 'other'}")
    ).run
    assert theirs.model.init_from == ours.model.init_from
    with pytest.raises(ConfigError, match=r"model\.init_sha256: here '.{64}', in the run '.{64}'"):
        check_same_run(ours, dump_config(theirs))


def test_weights_that_are_not_those_of_the_run_are_refused(tmp_path, folder):
    with pytest.raises(
        ConfigError, match=rf"{weights_sha256(folder)}, the run begins with {'0' * 64}"
    ):
        pin_weights_hash(config_from(tmp_path, folder, f"model.init_sha256={'0' * 64!r}"))


def test_the_same_weights_may_lie_elsewhere_on_an_island(tmp_path, folder):
    here = pin_weights_hash(config_from(tmp_path, folder))
    moved = folder.rename(tmp_path / "moved")
    there = pin_weights_hash(config_from(tmp_path, folder, f"island.init_from={moved}"))
    assert there.run.hash == here.run.hash


def test_a_joiner_needs_no_weights(tmp_path, folder):
    text = dump_config(pin_weights_hash(config_from(tmp_path, folder)).run)
    folder.rename(tmp_path / "gone")
    (tmp_path / "joiner.yaml").write_text(dump_config(parse_config(text, ["island.joins=true"])))
    assert load_config(tmp_path / "joiner.yaml").run.hash == parse_config(text).run.hash


def test_a_folder_without_weights_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        config_from(tmp_path, tmp_path)


def test_evaluate_gives_the_cross_entropy_of_the_text(tmp_path, folder):
    (tmp_path / "text.txt").write_text(TEXT)
    weights = open_weights(folder)
    corpus = load_text([str(tmp_path / "text.txt")], weights, None)
    found = evaluate(weights, corpus, None, "cpu")
    tokens = torch.tensor([*TEXT.encode(), 257])
    num = (len(tokens) - 1) // 32
    inputs, targets = tokens[: num * 32].view(num, 32), tokens[1 : num * 32 + 1]
    with torch.no_grad():
        expected = F.cross_entropy(spread_model()(inputs).flatten(0, 1), targets).item()
    assert found.tokens == num * 32
    assert found.loss == pytest.approx(expected, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(
        expected / math.log(2) * (len(TEXT) + 1) / len(TEXT), rel=1e-6
    )


def test_evaluate_reads_as_many_tokens_as_asked_for_and_short_texts(tmp_path, folder):
    weights = open_weights(folder)
    for name, text in (("1-short.txt", "hi"), ("2-long.txt", TEXT)):
        (tmp_path / name).write_text(text)
    short = load_text([str(tmp_path / "1-short.txt")], weights, None)
    assert evaluate(weights, short, 100, "cpu").tokens == 2
    both = load_text([str(tmp_path / "*.txt")], weights, 50)
    assert evaluate(weights, both, 50, "cpu").tokens == 64


def test_an_export_has_no_held_out_text(folder):
    with pytest.raises(InputError, match="name files or folders"):
        load_heldout_text(open_weights(folder))


def test_text_number_k_is_that_of_seed_plus_k(folder):
    weights = open_weights(folder)

    def texts(seed: int, count: int) -> list[str]:
        return [
            "".join(pieces)
            for pieces in generate_texts(
                weights, GenerateRequest("hi", 20, Sampling(), seed), count, "cpu"
            )
        ]

    assert texts(5, 3)[2] == texts(7, 1)[0] != texts(5, 1)[0]


def test_a_folder_that_is_neither_run_nor_export_is_named(tmp_path):
    with pytest.raises(InputError, match=r"holds no checkpoint: looked in .*<island>/checkpoints"):
        open_weights(tmp_path)


def test_a_damaged_longest_sequence_is_named(folder):
    change_config(folder, max_position_embeddings="long")
    with pytest.raises(InputError, match="max_position_embeddings is 'long'"):
        open_weights(folder)


def test_the_commands_export_evaluate_and_generate(tmp_path, folder):
    def output(*arguments: str) -> str:
        done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    small = tmp_path / "small"
    told = output("export", str(folder), str(small), "--dtype", "bfloat16")
    assert "parameters as bfloat16 in 1 file" in told and weights_sha256(small) in told
    (tmp_path / "text.txt").write_text(TEXT)
    assert "nats per token" in output(
        "evaluate", str(small), str(tmp_path / "text.txt"), "--device", "cpu"
    )
    asked = [
        "generate",
        str(small),
        "--prompt",
        "The",
        "--max-tokens",
        "9",
        "--temperature",
        "0",
        "--device",
        "cpu",
    ]
    assert output(*asked).startswith("The") and output(*asked) == output(*asked)
    assert output(*asked, "--count", "2").startswith("--- seed 0\nThe")


def test_learned_positions_bound_what_is_computed_with_a_folder(tmp_path):
    decoder = DecoderConfig(
        norm="layer",
        gated=False,
        out_bias=True,
        ffn_bias=True,
        positions="learned",
        max_positions=16,
    )
    sizes = replace(BYTE_SIZES, qk_norm=False, qkv_bias=True, num_kv_heads=4, decoder=decoder)
    weights = open_weights(write_folder(tmp_path / "gpt2", spread_model(sizes, seq_len=16)))
    (tmp_path / "text.txt").write_text(TEXT)
    corpus = load_text([str(tmp_path / "text.txt")], weights, None)
    assert (weights.seq_len, weights.window, evaluate(weights, corpus, 32, "cpu").tokens) == (
        16,
        16,
        32,
    )
    with pytest.raises(
        InputError, match=r"has learned 16 positions .*, and a sequence has 17 tokens"
    ):
        evaluate(weights, corpus, 32, "cpu", 17)
    with pytest.raises(InputError, match="has learned 16 positions"):
        next(generate_texts(weights, GenerateRequest("hi", 20, Sampling(), 0), 1, "cpu"))


def test_a_run_begins_from_a_model_with_its_sliding_window(tmp_path, folder):
    change_config(folder, use_sliding_window=True, sliding_window=16, max_window_layers=0)
    decoder = config_from(tmp_path, folder).model.decoder
    assert decoder is not None and decoder.window == WindowConfig(size=16)
