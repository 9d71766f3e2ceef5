"""island.auto: which settings an island may choose, what it takes, and that it takes the same
again.
"""

import json
from pathlib import Path

import pytest

from diloco.config.check import check_island, list_candidates
from diloco.config.schema import Config, parse_config
from diloco.errors import ConfigError
from diloco.tuning.choice import FILE, choose_settings
from outer.space.ranks import RankGroup

SMALL = """
name: auto
model: {dim: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_dim: 64}
data: {seq_len: 64}
optimizer: {tokens_per_step: 512}
island: {device: cpu, auto: [micro_batch, recompute]}
"""


def config(*overrides: str) -> Config:
    return parse_config(SMALL, overrides)


def choose(folder: Path, *overrides: str):
    island = config(*overrides).for_island(0)
    return choose_settings(config(*overrides).run, island, "cpu", RankGroup(), folder)


def test_candidates_divide_the_step_and_the_one_that_needs_least_memory_is_last():
    found = list_candidates(config().run, config().for_island(0))
    assert {each.micro_batch for each in found} == {1, 2, 4, 8}, "a step has 8 sequences"
    assert [found[-1].micro_batch, found[-1].parallel.recompute] == [1, "full"]
    assert not any(each.auto for each in found)


def test_a_mesh_is_chosen_among_those_that_the_heads_allow():
    settings = config("island.auto=[mesh]", "island.ranks=8", "island.micro_batch=1")
    found = list_candidates(settings.run, settings.for_island(0))
    assert [each.mesh.tp for each in found] == [1, 2, 4], "4 heads do not divide over 8 ranks"


def test_settings_that_no_candidate_can_use_are_refused_before_anything_starts():
    settings = config("island.ranks=3")
    with pytest.raises(
        ConfigError,
        match=r"^island 0: island.auto=.* finds no setting .*tokens_per_step .*must be a multiple",
    ):
        check_island(settings.run, settings.for_island(0), "island 0")


def test_a_later_start_takes_what_the_first_has_chosen(tmp_path: Path):
    first = choose(tmp_path / "island-0")
    assert first.parallel.recompute == "none", "everything fits, and recomputing is slower"
    path = tmp_path / "island-0" / FILE
    kept = json.loads(path.read_text())
    last = len(list_candidates(config().run, config().for_island(0))) - 1
    path.write_text(json.dumps(kept | {"number": last}))
    assert choose(tmp_path / "island-0").parallel.recompute == "full", (
        "it was read, not measured again"
    )
    assert "micro_batch" in (tmp_path / "LOGBOOK.md").read_text()


def test_what_was_chosen_for_another_config_is_not_taken(tmp_path: Path):
    choose(tmp_path / "island-0")
    key = json.loads((tmp_path / "island-0" / FILE).read_text())["key"]
    choose(tmp_path / "island-0", "optimizer.tokens_per_step=256")
    assert json.loads((tmp_path / "island-0" / FILE).read_text())["key"] != key


def test_a_model_that_fits_with_no_candidate_is_refused_with_what_it_needs(tmp_path: Path):
    large = ["model={preset: 405b}", "island.auto=[micro_batch]"]
    with pytest.raises(
        ConfigError, match=r"none of 4 settings fits .* micro_batch 1, recompute none"
    ):
        choose(tmp_path / "island-0", *large)
