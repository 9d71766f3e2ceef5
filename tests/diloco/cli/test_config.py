"""The commands `init` and `settings`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.config.new_config import write_config
from diloco.config.reference import config_schema
from diloco.config.schema import dump_config, load_config, parse_config
from diloco.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_settings_explains_what_has_the_word_in_its_name_or_meaning() -> None:
    done = CliRunner().invoke(app, ["settings", "below_quorum"])
    assert done.exit_code == 0
    assert done.stdout.startswith(
        "outer.below_quorum  (wait, continue, stop; default: wait)\n    What to do with fewer"
    )


def test_settings_gives_the_json_schema_of_a_config() -> None:
    assert (
        json.loads(CliRunner().invoke(app, ["settings", "--json-schema"]).stdout) == config_schema()
    )


@pytest.mark.parametrize(
    "words", [["zzz"], ["codec", "--markdown"], ["--markdown", "--json-schema"]]
)
def test_settings_refuses_what_it_cannot_answer(words: list[str]) -> None:
    assert CliRunner().invoke(app, ["settings", *words]).exit_code == 2


def test_init_writes_a_config_in_this_folder_and_says_what_is_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init", "first"])
    assert done.exit_code == 0 and "diloco simulate first.yaml" in done.stdout
    assert load_config(tmp_path / "first.yaml").name == "first"


def test_the_first_config_is_the_quickstart_over_tls_with_a_process_an_island(
    tmp_path: Path,
) -> None:
    changes = ["name=first", "outer.transport=tls", "islands=[{ranks: 1}, {ranks: 1}]"]
    expected = load_config(ROOT / "configs/quickstart.yaml", changes)
    assert dump_config(load_config(write_config("first", tmp_path))) == dump_config(expected)


@pytest.mark.parametrize(
    "line",
    [
        "source: files",
        "dataset: allenai/c4",
        "dataset_config: en",
        "tokenizer: gpt2",
        "paths: [my-text/**/*.txt",
    ],
)
def test_what_is_commented_out_in_the_first_config_is_a_setting(tmp_path: Path, line: str) -> None:
    text = write_config("first", tmp_path).read_text()
    found = next(each for each in text.splitlines() if each.startswith(f"  # {line}"))
    parse_config(f"data:\n  {found.lstrip(' #')}")


@pytest.mark.parametrize("name", ["../first", "", "a b"])
def test_init_refuses_a_name_that_is_no_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="allowed: at most 64 letters, digits"):
        write_config(name, tmp_path)


def test_init_replaces_no_file(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        write_config("first", tmp_path)
    assert (tmp_path / "first.yaml").read_text() == "mine"
