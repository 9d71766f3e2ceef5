"""The list of all settings: complete, explained, and the same on the page of the docs."""

from pathlib import Path

from diloco.config.overrides import flatten
from diloco.config.reference import find_settings, list_settings, settings_page
from diloco.config.schema import Config

ROOT = Path(__file__).parents[3]


def test_every_setting_has_a_sentence() -> None:
    assert [each.key for each in list_settings() if not each.meaning.endswith((".", ")"))] == []


def test_every_key_of_a_config_is_in_the_list() -> None:
    listed = {each.key for each in list_settings()}
    assert {key for key in flatten(Config().model_dump(mode="json")) if key not in listed} == set()


def test_the_defaults_that_are_listed_are_those_of_an_empty_config() -> None:
    listed = {each.key: each.default for each in list_settings()}
    config = flatten(Config().model_dump(mode="json"))
    for key in (
        "outer.inner_steps",
        "outer.codec",
        "island.mesh.dp_shard",
        "optimizer.schedule",
        "outer.eager",
    ):
        assert listed[key] == str(config[key]).replace("False", "false")


def test_the_page_of_settings_is_what_the_program_writes() -> None:
    cure = "diloco settings --markdown > docs/settings.md"
    assert (ROOT / "docs/settings.md").read_text() == settings_page(), cure


def test_settings_are_found_by_a_word_of_their_meaning() -> None:
    assert "outer.optimizer.nesterov" in [each.key for each in find_settings("NESTEROV")]


def test_the_limits_and_choices_of_a_setting_are_listed() -> None:
    listed = {each.key: each.allowed for each in list_settings()}
    assert listed["outer.mix"] == "number at least 0 and at most 1"
    assert listed["outer.below_quorum"] == "wait, continue, stop"
    assert listed["island.parallel.zero"] == "0, 1, 2, 3 or null"
