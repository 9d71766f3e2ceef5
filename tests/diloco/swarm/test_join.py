"""The folder of an island that joins a run."""

import pytest

from diloco.config.schema import dump_config, parse_config
from diloco.errors import ConfigError
from diloco.swarm.join import check_folder


def test_a_joiner_does_not_take_the_folder_of_another_run_of_the_same_name(tmp_path):
    ours, earlier = parse_config("", ["seed=1", "island.index=3"]), parse_config("", ["seed=2"])
    (tmp_path / "config.yaml").write_text(dump_config(earlier))
    with pytest.raises(
        ConfigError, match=r"belongs to another run named 'run'(.|\n)*seed: here 2, in the run 1"
    ):
        check_folder(tmp_path, ours)


@pytest.mark.parametrize("overrides", [[], ["island.index=7", "island.micro_batch=1"]])
def test_a_joiner_comes_back_to_its_own_folder_with_other_settings_of_its_own(tmp_path, overrides):
    (tmp_path / "config.yaml").write_text(dump_config(parse_config("", overrides)))
    check_folder(tmp_path, parse_config("", []))
    check_folder(tmp_path / "new", parse_config("", []))


def test_a_folder_whose_config_cannot_be_read_is_no_folder_to_join_in(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: [")
    with pytest.raises(ConfigError, match=r"move .* away"):
        check_folder(tmp_path, parse_config("", []))
