"""A swarm sets the run's part of a joiner's config: no key of the island, and no place on its
machine.
"""

import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from diloco.config.from_swarm import (
    FROM_SWARM,
    ISLAND_SECTIONS,
    NOT_FROM_SWARM,
    Origin,
    check_places,
    own_the_places,
    parse_swarm_config,
    swarm_text,
)
from diloco.config.schema import Config, IslandConfig, RunConfig, dump_config, parse_config
from diloco.connections import check_same_run
from diloco.errors import ConfigError
from diloco.runtime.corpus import data_of
from diloco.swarm.join import build_joiner_config

ADDRESS = "tcp://127.0.0.1:1"


def origin_of(key: str) -> Origin:
    """Where the value of a dotted key of the schema comes from on an island that joins. Raises
    KeyError if unknown.
    """
    section, _, name = key.rpartition(".")
    if key.split(".")[0] in ISLAND_SECTIONS:
        return "island"
    if key in NOT_FROM_SWARM:
        return NOT_FROM_SWARM[key]
    if name in FROM_SWARM.get(section, "").split():
        return "swarm"
    raise KeyError(
        f"{key} is a new key: say in diloco/config/from_swarm.py whether a swarm may set it"
    )


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The dotted keys of a schema with their types. The keys of a list's entries follow the list's
    own key.
    """
    for name, field in model.model_fields.items():
        sections = [part for part in parts_of(field.annotation) if issubclass(part, BaseModel)]
        for section in sections:
            yield from keys_of(section, f"{prefix}{name}.")
        if not sections:
            yield prefix + name, field.annotation


def parts_of(annotation: object) -> Iterator[type]:
    for part in typing.get_args(annotation):
        yield from parts_of(part)
    if isinstance(annotation, type) and not typing.get_args(annotation):
        yield annotation


KEYS = dict(keys_of(Config))


@pytest.mark.parametrize("key", KEYS)
def test_it_is_said_of_every_key_whether_a_swarm_may_set_it(key: str):
    assert origin_of(key) == (
        "island" if key.startswith("island") else NOT_FROM_SWARM.get(key, "swarm")
    )


def test_the_tables_name_no_key_twice_and_none_that_is_not_there():
    table = [
        f"{section}.{name}".lstrip(".")
        for section, names in FROM_SWARM.items()
        for name in names.split()
    ]
    assert sorted([*table, *NOT_FROM_SWARM]) == sorted(
        key for key in KEYS if not key.startswith("island")
    )


def test_a_new_key_must_be_classified():
    with pytest.raises(KeyError, match="new key"):
        origin_of("outer.brand_new")


def test_what_an_island_publishes_has_nothing_of_the_island():
    config = parse_config(
        "", ["island.run_key_file=secret", "island.checkpoint.mirror=s3://ours", "seed=3"]
    )
    text = swarm_text(config)
    assert "secret" not in text and "mirror" not in text
    assert parse_swarm_config(text) == config.run


@pytest.mark.parametrize(
    "section",
    ["island: {checkpoint: {mirror: /tmp/poison}}", "islands: [{init_from: /x}]", "island: {}"],
)
def test_a_swarms_text_that_sets_anything_of_an_island_is_refused(section: str):
    text = f"{swarm_text(RunConfig())}\n{section}\n"
    with pytest.raises(
        ConfigError, match=r"sets islands?, which only the operator of an island sets"
    ):
        build_joiner_config(text, set(), ADDRESS, [])


def test_a_joiners_island_is_what_its_operator_gives_and_the_defaults():
    run = parse_config("", ["seed=7", "data.source=python-stdlib"]).run
    config = build_joiner_config(swarm_text(run), {"island-0"}, ADDRESS, ["island.micro_batch=2"])
    own = IslandConfig(bootstrap=(ADDRESS,), index=1, joins=True, micro_batch=2)
    assert config.island == own and config.run == run and config.islands == ()


FILES = "data.source=files"
HUB = "data.source=huggingface"


@pytest.mark.parametrize(
    ("run", "key"),
    [
        ([FILES, "data.paths=[/etc/passwd]"], "data.paths"),
        ([HUB, "data.dataset=/home"], "data.dataset"),
        ([HUB, "data.dataset=../x"], "data.dataset"),
        ([HUB, "data.dataset=https://example.org/x"], "data.dataset"),
        (["data.tokenizer=~/tokenizer.json"], "data.tokenizer"),
        (["data.tokenizer=tests"], "data.tokenizer"),
        (["data.mixture=[{name: a, weight: 1, source: files, paths: [/root]}]"], "data.paths"),
    ],
)
def test_a_place_on_a_machine_is_never_taken_from_a_swarm(
    run: list[str], key: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(Path(__file__).parents[3])  # where `tests` is a folder
    with pytest.raises(
        ConfigError, match=f"{key}: .* A swarm does not say which files of this machine are read"
    ):
        build_joiner_config(swarm_text(parse_config("", run).run), set(), ADDRESS, [])


@pytest.mark.parametrize(
    ("run", "own"),
    [
        ([HUB, "data.dataset=allenai/c4", "data.max_tokens=100"], []),
        (["data.tokenizer=gpt2"], []),
        ([FILES, "data.paths=[/theirs]"], ["island.data_paths=[/ours]"]),
        (["data.tokenizer=/theirs.json"], ["island.tokenizer=/ours.json"]),
        (
            [
                "data.mixture=[{name: a, weight: 1, source: files, paths: [/theirs]}, {name: b, "
                "weight: 1}]"
            ],
            ["island.mixture_paths={a: [/ours]}"],
        ),
    ],
)
def test_names_on_the_hub_and_the_operators_own_places_are_used(
    run: list[str], own: list[str], tmp_path: Path
):
    theirs = parse_config("", run).run
    config = build_joiner_config(swarm_text(theirs), set(), ADDRESS, own)
    assert config.run.hash == theirs.hash
    assert "theirs" not in str(data_of(config.run, config.island))


def test_a_datasets_own_folder_replaces_its_name(tmp_path: Path):
    run = parse_config("", [HUB, "data.dataset=/theirs"]).run
    island = IslandConfig(data_paths=(str(tmp_path),))
    check_places(run, island)
    assert data_of(run, island).dataset == str(tmp_path)


def test_a_joiner_that_the_runs_own_operator_starts_reads_the_runs_places():
    run = parse_config("", [FILES, "data.paths=[/ours]", "data.tokenizer=/ours.json"]).run
    island = own_the_places(run, IslandConfig())
    check_places(run, island)
    assert (island.data_paths, island.tokenizer) == (("/ours",), "/ours.json")
    on_the_hub = parse_config("", [HUB, "data.dataset=allenai/c4", "data.tokenizer=gpt2"]).run
    assert own_the_places(on_the_hub, IslandConfig()) == IslandConfig()


OWN = "optimizer.name=tests.own.optimizers:Lion"
OWN_SOURCE = "tests.own.sources:Lines"


@pytest.mark.parametrize(
    "run",
    [
        [OWN],
        ["model.name=tests.own.models:GatedConv"],
        [f"data.source={OWN_SOURCE}", "data.options={skip: 1}"],
        [f"data.mixture=[{{name: a, weight: 1, source: '{OWN_SOURCE}'}}, {{name: b, weight: 1}}]"],
        ["outer.codec=tests.own.codecs:Sign"],
        ["outer.merge.rule=tests.own.merges:soft_mean"],
        ["outer.optimizer.rule=tests.own.rules:SignMomentum"],
    ],
    ids=["optimizer", "model", "source", "mixture", "codec", "merge rule", "outer optimizer"],
)
def test_no_key_of_a_swarm_imports_code(run: list[str]):
    with pytest.raises(
        ConfigError,
        match=r"config does not say which code .* add to island.allow_imports: tests\.own",
    ):
        build_joiner_config(swarm_text(parse_config("", run).run), set(), ADDRESS, [])


def test_an_own_source_reads_no_place_that_a_swarm_names():
    text = swarm_text(
        parse_config("", [f"data.source={OWN_SOURCE}", "data.paths=[/etc/passwd]"]).run
    )
    allowed = f"island.allow_imports=['{OWN_SOURCE}']"
    with pytest.raises(ConfigError, match=r"data.paths: .* island.data_paths=\[PATH\]"):
        build_joiner_config(text, set(), ADDRESS, [allowed])
    config = build_joiner_config(text, set(), ADDRESS, [allowed, "island.data_paths=[/ours]"])
    assert data_of(config.run, config.island).paths == ["/ours"]


@pytest.mark.parametrize(
    "allowed", ["[]", "[tests.own.optimizer]", "[tests.own.optimizers:UnitStep]", "[own]"]
)
def test_code_is_never_imported_because_a_swarm_names_it(allowed: str):
    text = swarm_text(parse_config("", [OWN]).run)
    with pytest.raises(
        ConfigError, match=r"add to island.allow_imports: tests.own.optimizers:Lion"
    ):
        build_joiner_config(text, set(), ADDRESS, [f"island.allow_imports={allowed}"])


@pytest.mark.parametrize(
    "allowed", ["tests", "tests.own", "tests.own.optimizers", "tests.own.optimizers:Lion"]
)
def test_code_that_the_joiners_operator_names_is_used(allowed: str):
    run = parse_config("", [OWN]).run
    config = build_joiner_config(
        swarm_text(run), set(), ADDRESS, [f"island.allow_imports=[{allowed}]"]
    )
    assert config.run.optimizer.name == "tests.own.optimizers:Lion" and config.run.hash == run.hash
    check_places(run, own_the_places(run, IslandConfig()))


def test_reading_a_config_imports_no_code():
    code = (
        "import sys; from diloco.config.from_swarm import parse_swarm_config as parse;"
        "run = parse('optimizer: {name: \"antigravity:fly\"}'); sys.exit('antigravity' in "
        "sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parents[3], timeout=180
        ).returncode
        == 0
    )


def test_islands_with_another_file_of_the_same_code_are_in_one_run_with_a_warning(
    caplog: pytest.LogCaptureFixture,
):
    ours, theirs = (
        parse_config("", [OWN, f"code_sha256={{'a.b:C': {digit}}}"]).run for digit in "ab"
    )
    check_same_run(ours, swarm_text(ours))
    assert not caplog.messages
    check_same_run(ours, swarm_text(theirs))
    assert "the file of a.b:C differs" in caplog.text


@pytest.mark.parametrize(
    ("params", "cure"),
    [
        ("", "`diloco join ADDRESS` fetches it"),
        ("2 parameters", "give all islands the same model and config"),
    ],
)
def test_another_config_is_refused_with_what_its_user_can_do(params: str, cure: str):
    ours = parse_config("", ["seed=1"]).run.model_copy(update={"params": params})
    with pytest.raises(ConfigError, match=re.escape(cure)):
        check_same_run(ours, swarm_text(parse_config("", ["seed=2"]).run))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB + "seed: *i",
        "[" * 30000,
        "seed: " + "9" * 5000,
        "- a",
        "\x00",
        "seed: !!python/name:os.system ''",
    ],
)
def test_a_hostile_text_is_one_short_error(text: str):
    with pytest.raises(ConfigError) as caught:
        parse_swarm_config(text)
    assert len(str(caught.value)) < 2000


def test_an_error_shows_no_control_characters_of_a_stranger():
    with pytest.raises(ConfigError) as caught:
        parse_swarm_config('"\\e[2Jseed": 3')
    assert "\x1b" not in str(caught.value)


def test_every_value_of_a_run_survives_the_way_through_the_swarm():
    config = parse_config(dump_config(parse_config("", ["outer.codec=int4", "name=x"])))
    assert parse_swarm_config(swarm_text(config.run)).hash == config.run.hash


def test_security_md_says_what_every_key_of_free_text_can_make_a_joiner_do() -> None:
    text = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    _, _, table = text.partition("| keys | read | fetch | run | write | wait |")
    keys = " ".join(
        line.split("|")[1] for line in table.split("\n\n")[0].splitlines() if line.startswith("|")
    )
    named = set(re.findall(r"`([a-z0-9_.]+)`", keys))
    for section, names in FROM_SWARM.items():
        for name in names.split():
            key = f"{section}.{name}".lstrip(".")
            is_text = any(part is str for part in parts_of(KEYS[key])) and "Literal" not in str(
                KEYS[key]
            )
            assert not is_text or {key, key.replace(".mixture", ""), name} & named, key
