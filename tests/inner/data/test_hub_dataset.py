"""A dataset is read from its own repository or folder, and from nothing else of this machine or its
network.
"""

from pathlib import Path

import pytest

pytest.importorskip("datasets")

import datasets
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

from diloco.config.from_swarm import check_places
from diloco.config.schema import parse_config
from diloco.errors import ConfigError
from inner.config import DataConfig
from inner.data.sources.build import build_source
from inner.data.sources.hub_dataset import (
    CARD,
    READERS_OF_FILES,
    SETTINGS,
    check_data_files,
    check_settings,
    leads_outside,
)
from inner.errors import InputError

SECRET = '{"text": "a secret of this machine"}'


def texts(dataset: Path | str) -> list[str]:
    config = DataConfig(source="huggingface", dataset=str(dataset), max_tokens=100)
    return [document.text for document in build_source(config).documents()]


def repository(folder: Path, card: str = "") -> Path:
    """A folder with the files of a dataset: one row, and a card."""
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"text": "a row"}\n')
    if card:
        (folder / CARD).write_text(f"---\n{card}\n---\n# A dataset\n")
    return folder


def test_every_reader_of_files_of_the_installed_library_is_known() -> None:
    assert set(_PACKAGED_DATASETS_MODULES) <= READERS_OF_FILES


@pytest.mark.parametrize("name", sorted(READERS_OF_FILES))
def test_the_name_of_a_reader_of_files_is_no_dataset(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("a secret of this machine")
    with pytest.raises(InputError, match=r"data\.source=files"):
        texts(name)


@pytest.mark.parametrize(
    ("key", "character"), [("escapechar", "\\"), ("sep", "/"), ("quotechar", "~")]
)
def test_a_character_that_divides_fields_is_no_place(key: str, character: str) -> None:
    check_settings(
        "a/b",
        CARD,
        f"configs: [{{config_name: default, data_files: rows.csv, {key}: '{character}'}}]",
    )


def test_a_place_is_refused_under_the_name_of_a_character(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="outside of its repository"):
        check_settings("a/b", CARD, "configs: [{config_name: default, sep: /etc/passwd}]")


HUB = ["data.source=huggingface", "data.max_tokens=100"]


@pytest.mark.parametrize(
    "settings",
    [
        [*HUB, "data.dataset=text"],
        ["data.mixture=[{name: a, source: huggingface, max_tokens: 9, weight: 1, dataset: json}]"],
    ],
)
def test_a_swarm_may_not_name_a_reader_of_files(settings: list[str]) -> None:
    config = parse_config("", settings)
    with pytest.raises(ConfigError, match="does not say which files of this machine are read"):
        check_places(config.run, config.island)


@pytest.mark.parametrize(
    "how", ["data_files: PLACE", "data_files: [{split: train, path: [PLACE]}]", "data_dir: FOLDER"]
)
def test_a_card_that_names_a_file_of_this_machine_is_refused(how: str, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text(SECRET)
    how = how.replace("PLACE", str(tmp_path / "secret.json")).replace("FOLDER", str(tmp_path))
    folder = repository(tmp_path / "theirs", f"configs:\n- config_name: default\n  {how}")
    with pytest.raises(InputError, match="outside of its repository"):
        texts(folder)


def test_settings_beside_the_card_are_held_to_the_same(tmp_path: Path) -> None:
    folder = repository(tmp_path / "theirs")
    (folder / SETTINGS).write_text(
        "configs: [{config_name: default, data_files: '../secret.json'}]"
    )
    with pytest.raises(InputError, match="outside of its repository"):
        texts(folder)


def test_a_card_that_names_files_of_its_own_is_read(tmp_path: Path) -> None:
    card = (
        "license: mit\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, "
        "path: 'rows*.jsonl'}"
    )
    assert texts(repository(tmp_path / "theirs", card)) == ["a row"]


@pytest.mark.parametrize(
    "place",
    ["http://169.254.169.254/x.json", "file:///etc/passwd", "s3://b/x", "zip://x::http://h/x",
    "/etc/x.json",
     "~/x.json", "../x.json", "a/../../x.json", "\\\\host\\x"],
)  # fmt: skip
def test_places_outside_of_a_repository(place: str) -> None:
    assert leads_outside(place)


@pytest.mark.parametrize("place", ["en/*.json.gz", "data/train-*", "**", "a..b/c", "default", ""])
def test_places_inside_of_a_repository(place: str) -> None:
    assert not leads_outside(place)


@pytest.mark.parametrize(
    "text", ["", "a list", "[1, 2]", "configs: 3", "configs: [1, {a: 2}]", "license: mit"]
)
def test_settings_that_name_no_data_pass(text: str) -> None:
    check_settings("a/b", CARD, text)


def test_settings_that_are_no_yaml_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"'a/b': README\.md is not valid YAML"):
        check_settings("a/b", CARD, "[" * 1000)


def test_files_that_were_found_elsewhere_are_refused() -> None:
    check_data_files("a/b", {"train": ["hf://datasets/a/b@0f/x.json"]})
    for place in ("hf://datasets/a/c@0f/x.json", "/etc/x.json", "http://h/x.json"):
        with pytest.raises(InputError, match="would be read from"):
            check_data_files("a/b", {"train": ["hf://datasets/a/b@0f/x.json"], "test": [place]})


def test_no_path_in_a_row_is_opened(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    (image := tmp_path / "a.png").touch()
    rows = {"text": ["a row"], "image": [{"bytes": None, "path": str(image)}]}
    (tmp_path / "theirs").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(
        str(tmp_path / "theirs" / "a.parquet")
    )
    image.unlink()
    assert texts(tmp_path / "theirs") == ["a row"]
