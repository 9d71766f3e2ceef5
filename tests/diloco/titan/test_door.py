"""`--module diloco.titan`: the command line, and what is refused before anything starts."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: docs/library.md says how")

from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import config_registry as llama_registry
from torchtitan.trainer import Trainer

from diloco.errors import ConfigError
from diloco.titan import config_registry
from diloco.titan.options import ROUTER_BIASES, join_lists, read_buffers
from diloco.titan.trainer import IslandsTrainer, with_islands
from tests.diloco.titan import small

pytestmark = pytest.mark.slow
RUN = "name: titan\nouter: {rounds: 4, inner_steps: 3, start_islands: 2, transport: tls}\n"
WORDS = ["--module", "diloco.titan", "--config", "llama3_debugmodel", "--islands", "run.yaml"]


def test_the_command_line_gives_the_run_and_what_is_this_island_own() -> None:
    words = [
        *WORDS,
        "--island",
        "island.index=1,island.bootstrap=[tcp://a:1,tcp://b:2]",
        "--training.steps",
        "12",
    ]
    config = ConfigManager().parse_args(words)
    assert issubclass(type(config)._owner, IslandsTrainer)
    assert (config.islands, config.training.steps) == ("run.yaml", 12)
    assert join_lists(config.island) == ["island.index=1", "island.bootstrap=[tcp://a:1,tcp://b:2]"]


def test_every_config_of_its_models_is_found_by_its_name() -> None:
    names = dir(config_registry)
    assert {"llama3_8b", "llama3_405b", "qwen3_30b_a3b", "deepseek_v3_671b"} <= set(names)
    assert issubclass(type(config_registry.deepseek_v3_debugmodel())._owner, IslandsTrainer)


def test_a_name_that_no_config_has_is_refused_with_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        config_registry, "load_registries", lambda name="", failed=None: iter([llama_registry])
    )
    with pytest.raises(ValueError, match=r"'llama9' not found .*'llama3_8b'"):
        ConfigManager().parse_args(["--module", "diloco.titan", "--config", "llama9"])


def test_a_name_in_a_registry_that_cannot_be_imported_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan.models.qwen3.config_registry", None)
    with pytest.raises(ImportError, match=r"'qwen3_14b' .* cannot be imported: .*qwen3: "):
        ConfigManager().parse_args(["--module", "diloco.titan", "--config", "qwen3_14b"])


def test_a_trainer_of_your_own_stays_one() -> None:
    class Own(Trainer):
        @dataclass(kw_only=True, slots=True)
        class Config(Trainer.Config):
            own: int = 3

    made = with_islands(Own.Config(own=4, model_spec=llama_registry.llama3_debugmodel().model_spec))
    assert issubclass(type(made)._owner, IslandsTrainer) and issubclass(type(made)._owner, Own)
    assert made.own == 4


def set_steps(config: Trainer.Config) -> None:
    config.training.steps = 11


def forget_run(config: Trainer.Config) -> None:
    config.islands = ""


def use_remote_folder(config: Trainer.Config) -> None:
    config.checkpoint.enable = True
    config.dump_folder = "s3://bucket/outputs"


def name_badly(config: Trainer.Config) -> None:
    config.island_buffers = ["*.running_mean"]


def change_model(config: Trainer.Config) -> None:
    config.island = ["model.dim=8"]


def test_the_example_of_a_registry_gives_an_island() -> None:
    words = [
        "--module",
        "examples.torchtitan_registry",
        "--config",
        "small_llama",
        "--islands",
        "run.yaml",
    ]
    config = ConfigManager().parse_args(words)
    assert issubclass(type(config)._owner, IslandsTrainer)
    assert len(config.model_spec.model.layers) == 4


@pytest.mark.parametrize(
    "change, message",
    [
        (set_steps, r"training\.steps is 11, and the run has 12 steps .* set --training\.steps 12"),
        (forget_run, "--islands is missing: give the YAML file"),
        (use_remote_folder, "folder s3://bucket/outputs/checkpoint is remote"),
        (name_badly, "--island_buffers: got .*running_mean.*; give NAME=mean or NAME=donor"),
        (change_model, "sets model"),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_starts(
    tmp_path: Path, change: Callable[[Trainer.Config], None], message: str
) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    config = small.llama3()
    config.islands = str(tmp_path / "run.yaml")
    config.island = ["island.bootstrap=[tcp://127.0.0.1:1]"]
    change(config)
    with pytest.raises(ConfigError, match=message):
        config.build()


def test_biases_of_routers_are_shared_where_there_are_some() -> None:
    assert read_buffers(small.deepseek_v3()) == {ROUTER_BIASES: "mean"}
    assert read_buffers(small.llama3()) == {}
