"""Configs: strict, overridable, hashed; a mistake gets an error that says what to do."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.config.check import check_fragments, check_island
from diloco.config.from_swarm import parse_swarm_config
from diloco.config.overrides import differing_keys
from diloco.config.schema import dump_config, load_config, parse_config
from diloco.errors import ConfigError
from diloco.planning.mesh.step_plan import build_step_plan
from inner.errors import InputError
from inner.model.sizes import resolve_sizes

ROOT = Path(__file__).parents[3]
CONFIGS = sorted(
    path for path in (ROOT / "configs").rglob("*.yaml") if "experiments" not in path.parts
)
HASH_OF_DEFAULTS = "e6ce1fd6727c23d23c1c8ebfb9aa48d7"
"""Of a config that sets nothing. Keys that came later leave it as it is, or islands of two releases
would not meet.
"""


def error_of(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_in_the_folder_loads_and_its_islands_can_train_it(path):
    config = load_config(path)
    resolve_sizes(config.model, config.model.vocab_size or 260)
    for index in range(len(config.islands)):
        check_island(config.run, config.for_island(index), f"island {index}")


def test_an_unknown_key_names_the_nearest_one():
    message = error_of("outer: {inner_step: 3}")
    assert "outer.inner_step: unknown key" in message and "did you mean 'inner_steps'?" in message


def test_an_unknown_section_names_the_nearest_one():
    assert "did you mean 'outer'?" in error_of("outr: {}")


def test_a_wrong_type_says_what_was_got_and_what_is_allowed():
    message = error_of("outer: {inner_steps: many}")
    assert "outer.inner_steps" in message and "got 'many'; allowed: a whole number" in message


def test_a_key_without_its_section_names_the_section():
    assert "rounds: unknown key; did you mean outer.rounds?" in error_of("rounds: 3")


def test_a_value_for_a_section_says_how_a_key_of_it_is_set():
    assert "outer: got 3; allowed: a section" in error_of("outer: 3")


@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_a_number_that_is_not_finite_is_refused(value: str):
    assert "optimizer.lr: got" in error_of(f"optimizer: {{lr: {value}}}")


def test_an_unknown_codec_lists_the_choices():
    message = error_of("outer: {codec: int9}")
    assert "'int9'" in message
    assert (
        "allowed: fp32, bf16, fp16, int8, int4, e3m0, stat2, topk, lowrank, or own code by its "
        "import path" in message
    )


def test_an_unknown_transport_lists_the_choices():
    assert "'loopback', 'gloo', 'tls' or 'hivemind'" in error_of(
        "outer: {transport: carrier-pigeon}"
    )


def test_a_mistake_in_one_of_the_islands_names_it():
    assert "islands[1].micro_bach: unknown key; did you mean 'micro_batch'?" in error_of(
        "islands: [{ranks: 1}, {micro_bach: 3}]"
    )


@pytest.mark.parametrize("text", ["1: 2", "~: 3", "outer: {1: 2}", "outer: {true: 2}"])
@pytest.mark.parametrize("parse", [parse_config, parse_swarm_config], ids=["own", "of a swarm"])
def test_a_key_that_is_no_text_is_named(parse: Callable[[str], object], text: str):
    with pytest.raises(ConfigError, match="Keys should be strings"):
        parse(text)


@pytest.mark.parametrize(
    "text", ["outer: {codec: int8}\nouter: {}\n", "outer: {codec: int8, codec: int4}"]
)
def test_a_key_that_stands_twice_is_refused_because_one_value_would_be_lost(text):
    with pytest.raises(ConfigError, match=r"stands in line 1 and again in line [12]; keep one"):
        parse_config(text)


def test_a_key_may_replace_one_that_an_alias_brings():
    assert parse_config("outer: {<<: {codec: int8}, codec: int4}").outer.codec == "int4"


def test_text_that_is_not_yaml_is_an_error_not_a_traceback():
    assert "not valid YAML" in error_of("a: [1")


def test_a_config_that_is_a_list_is_refused():
    assert "got a list" in error_of("- 1")


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config("nowhere.yaml")


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"model\.safetensors is not text"):
        load_config(path)


def test_an_exponent_without_a_dot_is_a_number():
    # PyYAML reads 3e-4 as a string.
    assert parse_config("optimizer: {lr: 3e-4}").optimizer.lr == 3e-4


def test_an_override_wins_over_the_file():
    config = parse_config(
        "optimizer: {lr: 1e-3}", ["optimizer.lr=2e-3", "outer.optimizer.momentum=0.5"]
    )
    assert (config.optimizer.lr, config.outer.optimizer.momentum) == (2e-3, 0.5)


def test_an_override_without_a_value_says_how_one_is_written():
    assert "section.key=value" in error_of("", "outer.rounds")


def test_an_island_inherits_what_all_share_and_keeps_its_own():
    config = parse_config(
        "island: {micro_batch: 4, mesh: {dp_replicate: 2}}\nislands: [{}, {ranks: 2, mesh: "
        "{dp_shard: 1}}]"
    )
    second = config.for_island(1)
    assert (second.micro_batch, second.ranks, second.mesh.dp_replicate, second.mesh.dp_shard) == (
        4,
        2,
        2,
        1,
    )


def test_the_hash_ignores_what_is_an_islands_own_business():
    assert (
        parse_config("island: {micro_batch: 4}").run.hash
        == parse_config("island: {ranks: 8}").run.hash
    )


def test_the_hash_changes_with_every_shared_key():
    changes = [
        "seed=1",
        "model.preset=4m",
        "data.seq_len=128",
        "optimizer.lr=1e-3",
        "outer.codec=int8",
    ]
    hashes = {parse_config("", [change]).run.hash for change in changes} | {
        parse_config("").run.hash
    }
    assert len(hashes) == len(changes) + 1


def test_a_dumped_config_reads_back_the_same():
    config = load_config(ROOT / "configs/quickstart.yaml")
    assert parse_config(dump_config(config.run)).run == config.run


def test_differing_keys_names_each_with_both_values():
    ours, theirs = parse_config("seed: 1").run, parse_config("outer: {codec: int8}").run
    assert differing_keys(ours, theirs) == [
        "seed: here 1, in the run 0",
        "outer.codec: here 'fp32', in the run 'int8'",
    ]


def test_the_command_line_wins_over_what_an_island_says_for_itself():
    config = parse_config(
        "islands: [{ranks: 2, mesh: {tp: 2}}, {}]", ["island.ranks=4", "island.mesh.pp=2"]
    )
    assert [config.for_island(index).ranks for index in range(3)] == [4, 4, 4]
    assert (
        config.for_island(0).mesh.tp,
        config.for_island(0).mesh.pp,
        config.for_island(1).mesh.tp,
    ) == (2, 2, 1)


def test_a_mesh_that_does_not_divide_the_ranks_is_an_error_with_a_cure():
    config = parse_config("island: {ranks: 3, mesh: {dp_replicate: 2}}")
    with pytest.raises(ConfigError, match=r"island 0: island.mesh: dp_replicate 2.*3 ranks"):
        check_island(config.run, config.for_island(0), "island 0")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            ["optimizer.name=adam"],
            "got 'adam'; allowed: adamw, sgd, muon, or own code by its import path",
        ),
        (
            ["optimizer.options={beta1: 0.9}"],
            "options are for an own optimizer only, and name is adamw",
        ),
        (["optimizer.name=a:B", "optimizer.options={betas: {x: 1}}"], "optimizer.options.betas"),
    ],
    ids=str,
)
def test_an_optimizer_is_one_of_ours_or_an_import_path(settings: list[str], why: str):
    assert why in error_of("", *settings)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            ["model.name=my model"],
            "model.name: got 'my model'; allowed: own code by its import path as in my_package",
        ),
        (["model.options={dim: 8}"], "options are for an own model only, and no name is given"),
        (
            ["model.name=a:B", "model.preset=1m"],
            "preset: for the built-in model only, and name is a:B; leave it out or",
        ),
    ],
    ids=str,
)
def test_a_model_is_ours_or_an_own_one(settings: list[str], why: str):
    assert why in error_of("", *settings)


def test_an_own_model_is_tried_and_counted_before_any_process_starts():
    config = parse_config(
        "outer: {fragments: 9}", ["model.name=tests.own.models:GatedConv", "model.options={dim: 8}"]
    )
    check_island(config.run, config.for_island(0), "island 0")
    with pytest.raises(ConfigError, match=r"outer.fragments: got 9, but a model of 2 layers"):
        check_fragments(config.run)
    over = parse_config(
        "island: {ranks: 2, mesh: {tp: 2}}", ["model.name=tests.own.models:GatedConv"]
    )
    with pytest.raises(
        ConfigError,
        match=r"^island 0: island.mesh: tp 2, but .* over dp_replicate and dp_shard only",
    ):
        check_island(over.run, over.for_island(0), "island 0")
    with pytest.raises(
        InputError, match="an own model: its FLOPs, memory and traffic cannot be counted"
    ):
        build_step_plan(config.run, config.for_island(0))


def test_an_own_optimizer_that_does_not_fit_the_mesh_is_found_before_any_process_starts():
    config = parse_config(
        "model: {preset: 1m}\nisland: {ranks: 2}", ["optimizer.name=tests.own.optimizers:UnitStep"]
    )
    with pytest.raises(
        ConfigError, match=r"^island 0: optimizer.name: .* steps the shards of a matrix differently"
    ):
        check_island(config.run, config.for_island(0), "island 0")


def test_the_hash_has_an_own_optimizers_path_and_options():
    names = ["optimizer.name=a.b:C", "optimizer.name=a.b:D"]
    hashes = {
        parse_config("", [name, *more]).run.hash
        for name in names
        for more in ([], ["optimizer.options={x: 1}"])
    }
    assert len(hashes) == 4


def test_more_fragments_than_layers_is_found_before_any_process_starts():
    run = parse_config("outer: {fragments: 7}\nmodel: {preset: 1m}").run
    with pytest.raises(
        ConfigError,
        match=r"outer.fragments: got 7, but a model of 4 layers .* set outer.fragments=5",
    ):
        check_fragments(run)


@pytest.mark.parametrize(
    "settings,text",
    [
        (["optimizer.name=muon"], "inner optimizer is muon; set optimizer.name to adamw"),
        (["optimizer.name=sgd"], "inner optimizer is sgd; set optimizer.name to adamw"),
        (["optimizer.averaging={x: 0.9}"], "adamw, averaged; .* optimizer.averaging to null"),
        (["outer.eager=true", "outer.delay=1"], "outer: .* set eager to false or moments to null"),
        (
            ["outer.merge.rule=radial"],
            "outer: .* merged by radial.*; set merge.rule to mean, trimmed_mean or",
        ),
        (["outer.moments=[0, 6]"], r"outer.moments.0: got 0; allowed: greater than 0"),
        (["outer.moments=3"], "outer.moments: got 3"),
    ],
    ids=str,
)
def test_moments_that_cannot_be_averaged_are_refused_with_the_cure(settings: list[str], text: str):
    with pytest.raises(ConfigError, match=text):
        parse_config("outer: {moments: [3, 6]}", settings)


@pytest.mark.parametrize("setting", ["wandb=offline", "tensorboard=true"])
def test_a_logger_whose_package_is_missing_is_named_with_its_extra(
    setting: str, monkeypatch: pytest.MonkeyPatch
):
    extra = setting.partition("=")[0]
    # None is what Python's import system takes for a package that is not there.
    monkeypatch.setitem(sys.modules, extra, None)
    config = parse_config("", [f"island.{setting}"])
    with pytest.raises(ConfigError, match=rf"island 0: island.{extra} is set.*'diloco\[{extra}\]'"):
        check_island(config.run, config.for_island(0), "island 0")


def test_an_order_seed_is_part_of_the_hash_only_where_it_is_set():
    """So a run without one keeps the hash that an older version gave it."""
    plain, set_to_0 = parse_config("seed: 0").run, parse_config("order_seed: 0").run
    assert (plain.reading_seed, set_to_0.reading_seed) == (0, 0)
    assert plain.hash != set_to_0.hash
    assert plain.hash == HASH_OF_DEFAULTS


def test_settings_of_own_code_between_islands_are_part_of_the_hash_only_where_they_are_set():
    rule = parse_config("outer: {optimizer: {rule: 'a:b'}}").run
    options = parse_config("outer: {optimizer: {rule: 'a:b', options: {c: 1}}}").run
    assert len({HASH_OF_DEFAULTS, rule.hash, options.hash}) == 3


def test_the_bound_of_means_is_part_of_the_hash_only_where_it_is_not_the_default():
    plain, same = parse_config("").run, parse_config("outer: {merge: {refuse_norm_ratio: 20}}").run
    other, without = (
        parse_config(f"outer: {{merge: {{refuse_norm_ratio: {v}}}}}").run for v in ("30", "null")
    )
    assert plain.hash == same.hash
    assert len({plain.hash, other.hash, without.hash}) == 3
