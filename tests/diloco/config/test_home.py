"""`~` in each key of a config that names a place is the home directory, and an error where there is
none.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

import diloco
from diloco.cli.main import app
from diloco.config.island import IslandConfig
from diloco.config.schema import load_config, parse_config
from diloco.errors import ConfigError
from inner.data.sources.documents import TextField
from inner.data.sources.files import find_files
from inner.data.sources.huggingface import HuggingFaceSource
from inner.data.tokenizer import tokenizer_folder
from inner.errors import InputError
from inner.files import open_url
from outer.errors import InputError as OuterInputError
from outer.network.run_key import load_run_key

ALONE = {
    "outer": {"transport": "loopback", "rounds": 1, "inner_steps": 1},
    "island": {"run_dir": "~/runs"},
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory, while the working folder is another."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.fixture
def no_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user whom a container does not know."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 4_000_000_000)


def test_a_loop_of_ones_own_records_below_the_home_directory(home: Path) -> None:
    with diloco.Islands(ALONE, nn.Linear(2, 2)) as islands:
        islands.step(tokens=1)
    assert (home / "runs" / "run" / "island-0" / "metrics.jsonl").exists()
    assert os.listdir() == []


def test_a_command_finds_the_island_below_the_home_directory(home: Path) -> None:
    Path("run.yaml").write_text("island: {run_dir: ~/runs}\n")
    assert CliRunner().invoke(app, ["key", "run.yaml"]).exit_code == 0
    assert [path.name for path in (home / "runs" / "run" / "island-0").iterdir()] == ["island.key"]
    assert os.listdir() == ["run.yaml"]


def test_what_a_config_names_is_found_in_the_home_directory(home: Path) -> None:
    for name in ("tokenizer.json", "a.txt", "run.key"):
        (home / name).write_text("0123456789" * 4)
    (home / "rows").mkdir()
    (home / "rows" / "a.jsonl").write_text("{}")
    assert tokenizer_folder("~/tokenizer.json") == home
    assert find_files("~/a.txt") == [("a.txt", home / "a.txt")]
    dataset = HuggingFaceSource("~/rows", None, "train", TextField("text"))
    assert "a.jsonl" in str(dataset.fingerprint())
    assert load_run_key("~/run.key") is not None
    assert str(open_url("~/mirror", "")[1]) == str(home / "mirror")
    assert (
        parse_config("model: {init_from: ~/weights}").initial_weights(IslandConfig())
        == home / "weights"
    )


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize(
    "read, text",
    [
        (
            lambda: IslandConfig(run_dir="~/runs").folder("run"),
            "island.run_dir: '~/runs' begins with a home directory",
        ),
        (
            lambda: IslandConfig().cache,
            "island.cache_dir: '~/.cache/diloco' begins with a home directory",
        ),
        (lambda: find_files("~/a.txt"), "data.paths: '~/a.txt' begins with"),
        (
            lambda: tokenizer_folder("~/tokenizer.json"),
            "data.tokenizer: '~/tokenizer.json' begins with",
        ),
        (
            lambda: load_run_key("~/run.key"),
            "island.run_key_file: cannot read '~/run.key': No such file",
        ),
        (
            lambda: open_url("~/mirror", "island.checkpoint.mirror"),
            "island.checkpoint.mirror: '~/mirror' begins with",
        ),
    ],
)
def test_without_a_home_directory_the_key_is_named(read: Callable[[], object], text: str) -> None:
    with pytest.raises((InputError, OuterInputError)) as refused:
        read()
    assert str(refused.value).startswith(text)
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("no_home")
def test_without_a_home_directory_no_folder_is_made() -> None:
    with pytest.raises(InputError, match=r"island\.run_dir"):
        diloco.Islands(ALONE, nn.Linear(2, 2))
    Path("run.yaml").write_text("model: {init_from: ~/weights}\n")
    with pytest.raises(ConfigError, match=r"model\.init_from: '~/weights' begins with"):
        load_config("run.yaml")
    assert os.listdir() == ["run.yaml"]
