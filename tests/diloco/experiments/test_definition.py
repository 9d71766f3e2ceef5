"""The file of an experiment, and the rows that follow from it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco.errors import ConfigError
from diloco.experiments.definition.build import build_points, build_rows
from diloco.experiments.definition.rows import Rows, select
from diloco.experiments.definition.schema import dump_experiment, load_experiment
from diloco.experiments.results.plots import group_of
from inner.huggingface.files import weights_sha256
from tests.diloco.experiments.tiny import TINY, write_tiny
from tests.inner.folders import BYTE_SIZES, spread_model, write_folder

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "configs/experiments").glob("*.yaml"))


def rows_of(folder: Path, **changes: Any) -> Rows:
    return build_rows(load_experiment(write_tiny(folder, **changes)))


def labels(rows: Rows) -> list[str]:
    return [row.label for row in rows.rows]


def test_axes_are_crossed_and_the_keys_of_one_are_zipped(tmp_path):
    axes = [{"islands": [1, 2]}, {"outer.inner_steps": [4, 8], "outer.codec": ["int8", "int4"]}]
    points = [row.point for row in rows_of(tmp_path, axes=axes, baseline=None).rows]
    assert points == [
        {"islands": count, "outer.inner_steps": steps, "outer.codec": codec}
        for count in (1, 2)
        for steps, codec in ((4, "int8"), (8, "int4"))
    ]


def test_a_row_is_called_by_the_method_that_ran(tmp_path):
    points = [
        {},
        {"outer.optimizer": {"lr": 1.0, "momentum": 0.0, "nesterov": False}, "outer.codec": "fp32"},
        {"optimizer.name": "muon", "outer.codec": "stat2", "outer.coding": {"feedback": 0.9}},
        {"outer.fragments": 2, "outer.delay": 1, "optimizer.lr": 3e-3},
        {"outer.gossip": {}, "outer.optimizer": {}},
    ]
    assert labels(rows_of(tmp_path, axes=[points]))[-5:] == [
        "Nesterov 0.7/0.9, H 4, 2 islands, bf16",
        "plain averaging, H 4, 2 islands, fp32",
        "Nesterov 0.7/0.9, Muon inside, H 4, 2 islands, stat2 feedback 0.9",
        "Nesterov 0.7/0.9, H 4, 2 islands, 2 fragments, tau 1, bf16, lr 0.003",
        "gossip of 2 0.7/0.5, pull 0.7, H 4, 2 islands, bf16",
    ]


def test_sizes_with_fewer_seeds_are_on_the_line_of_the_others(tmp_path):
    models = [TINY["base"]["model"] | {"ffn_dim": dim} for dim in (64, 128)]
    sizes = {"model": models, "seeds": [[0, 1], [0]]}
    groups = {group_of(row, "params") for row in rows_of(tmp_path, axes=[sizes]).rows}
    assert len(groups) == 2, "data-parallel training and DiLoCo"


def test_what_a_step_holds_is_in_the_label_where_it_varies(tmp_path):
    rows = rows_of(tmp_path, axes=[{"step_tokens": [128, 256]}, {"outer.inner_steps": [4, 8]}])
    assert labels(rows)[:3] == [
        "data-parallel AdamW, 128 tokens per step",
        "data-parallel AdamW, 256 tokens per step",
        "Nesterov 0.7/0.9, H 4, 2 islands, bf16, 128 tokens per step",
    ]


def test_rows_of_equal_labels_are_told_apart_by_their_points(tmp_path):
    rows = rows_of(
        tmp_path,
        axes=[{"outer.merge": [{"rule": "trimmed_mean", "trim": trim} for trim in (0.1, 0.2)]}],
    )
    assert len(set(labels(rows))) == len(rows.rows) == 3


def test_each_row_has_the_data_parallel_training_of_its_model_and_tokens_as_baseline(tmp_path):
    rows = rows_of(tmp_path, axes=[{"optimizer.lr": [0.01, 0.02]}, {"islands": [1, 2]}])
    assert labels(rows)[:2] == ["data-parallel AdamW, lr 0.01", "data-parallel AdamW, lr 0.02"]
    for row in rows.rows[2:]:
        baseline = rows.baselines[row.row_id].config
        assert baseline.optimizer.lr == row.config.optimizer.lr
        assert baseline.total_tokens == row.config.total_tokens
        assert len(baseline.islands) == 1
        assert baseline.optimizer.tokens_per_step == 256


def test_another_baseline_is_named_by_the_values_that_lead_to_it(tmp_path):
    rows = rows_of(tmp_path, baseline={"outer.inner_steps": 4})
    first, second = rows.rows
    assert [rows.baselines[row.row_id].row_id for row in (first, second)] == [first.row_id] * 2


def test_the_run_is_as_long_as_tokens_say_and_evaluated_as_often(tmp_path):
    overrides = {
        "step_tokens": 256,
        "tokens_per_param": 1.0,
        "steps_multiple_of": 16,
        "evaluations": 4,
        "islands": 2,
    }
    for row in rows_of(tmp_path, overrides=overrides, baseline=None).rows:
        assert row.config.total_steps == round(row.num_params / 256 / 16) * 16
        assert row.config.optimizer.tokens_per_step == 128
        assert 3 <= row.config.outer.rounds / row.config.evaluate.every_rounds <= 5


def test_an_id_follows_from_values_that_are_no_defaults(tmp_path):
    (row,) = rows_of(tmp_path, axes=[], baseline=None).rows
    (same,) = rows_of(
        tmp_path, axes=[[{"outer.fragments": 1, "island.checkpoint.keep": 7}]], baseline=None
    ).rows
    (other,) = rows_of(tmp_path, axes=[[{"optimizer.weight_decay": 0.2}]], baseline=None).rows
    assert row.row_id == same.row_id != other.row_id
    assert len({row.run(seed).run_id for seed in range(3)}) == 3


def test_the_ids_of_rows_stay_when_others_are_added(tmp_path):
    before = rows_of(tmp_path)
    after = rows_of(tmp_path, axes=[{"outer.inner_steps": [4, 12, 8]}])
    assert {row.row_id for row in before.rows} < {row.row_id for row in after.rows}


def test_the_written_experiment_needs_no_other_file(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(TINY["base"]))
    (tmp_path / "other.yaml").write_text(
        yaml.safe_dump({**TINY["base"], "name": "other", "seed": 3})
    )
    axes = [[{"outer.codec": "int8"}, {"config": "other.yaml"}], {"config": ["base.yaml"]}]
    path = write_tiny(tmp_path, base="base.yaml", axes=axes[:1])
    rows = build_rows(load_experiment(path))
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "experiment.yaml").write_text(dump_experiment(load_experiment(path)))
    again = build_rows(load_experiment(folder / "experiment.yaml"))
    assert [row.row_id for row in again.rows] == [row.row_id for row in rows.rows]
    assert len(build_rows(load_experiment(write_tiny(tmp_path, axes=axes[1:]))).rows) == 2


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"axes": [{"islands": [1, 2], "seed": [1]}]}, "zipped"),
        (
            {"axes": [{"outer.inner_step": [4]}]},
            "outer.inner_step: unknown key; did you mean 'inner_steps'",
        ),
        ({"axes": [{"islands": [3]}]}, "256 tokens of a step do not divide over 3 islands"),
        (
            {"axes": [{"outer.inner_steps": [5]}]},
            "24 steps are no multiple of outer.inner_steps, 5",
        ),
        ({"axes": [{"outer.local_steps": ["dynamic"]}]}, "use fixed"),
        ({"axes": [{"model.dim": [33]}]}, "tiny: model.dim=33"),
        ({"seeds": [1, 1]}, "different numbers"),
        ({"base": "missing.yaml"}, "cannot read"),
        ({"report": {"link": "fast"}}, "not a bit rate"),
        ({"axis": []}, "axis: unknown key; did you mean 'axes'"),
    ],
)
def test_a_mistake_is_reported_with_its_place_and_cure(tmp_path, changes, error):
    with pytest.raises(ConfigError, match=error):
        rows_of(tmp_path, **changes)


def test_rows_are_selected_by_number_or_part_of_the_name(tmp_path):
    rows = rows_of(tmp_path).rows
    assert select(rows, []) == rows
    assert select(rows, ["1", "h 8"]) == [rows[0], rows[2]]
    with pytest.raises(ConfigError, match="--only 'adam2'"):
        select(rows, ["adam2"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_experiment_of_this_repository_has_valid_rows_of_equal_tokens(path):
    experiment = load_experiment(path)
    rows = build_rows(experiment)
    assert experiment.name == path.stem
    assert len(set(labels(rows))) == len(rows.rows) >= 4
    for row in rows.rows:
        tokens = rows.baselines.get(row.row_id, row).config.total_tokens
        assert row.config.total_tokens == tokens
        # Each token uses some of a mixture's experts.
        num_active = (
            row.num_params if path.stem != "experts" else min(r.num_params for r in rows.rows)
        )
        assert 18 < tokens / num_active < 22 or path.stem == "short"


def test_fine_tuning_begins_from_exports_with_their_sizes_and_is_another_run_with_other_weights(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment(ROOT / "configs/experiments/fine-tuning/fine-tuning.yaml")
    points = [point["model"]["init_from"] for point in build_points(experiment)]
    for number, name in enumerate(points):
        write_folder(tmp_path / name, spread_model(seed=number))
    before = build_rows(experiment).rows
    assert [row.config.model.init_sha256 for row in before] == [
        weights_sha256(tmp_path / name) for name in points
    ]
    assert {row.config.model.dim for row in before} == {BYTE_SIZES.dim}
    shutil.rmtree(tmp_path / points[0])
    write_folder(tmp_path / points[0], spread_model(seed=99))
    changed = [
        old.row_id != new.row_id
        for old, new in zip(before, build_rows(experiment).rows, strict=True)
    ]
    assert changed == [True] + [False] * 5


def test_a_row_may_have_seeds_of_its_own(tmp_path):
    rows = rows_of(tmp_path, axes=[{"outer.inner_steps": [4, 8], "seeds": [[0, 1, 2], [5]]}])
    assert [row.seeds for row in rows.rows] == [(0, 1, 2, 5), (0, 1, 2), (5,)]


def test_a_key_that_is_no_text_is_named(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("name: a\nbase: {}\n1: 2\n")
    with pytest.raises(ConfigError, match="Keys should be strings"):
        load_experiment(tmp_path / "a.yaml")
