"""Spikes, z-loss and the noise scale are refused where they cannot be had, before any process
starts.
"""

from pathlib import Path

import pytest

from diloco.config.check import check_island
from diloco.config.schema import load_config
from diloco.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
REWIND = "optimizer.spikes.action=rewind"


def check(*overrides: str, file: str = "quickstart.yaml") -> None:
    config = load_config(CONFIGS / file, overrides)
    check_island(config.run, config.for_island(0), "island 0")


def test_they_go_with_plain_rounds():
    check(REWIND, "optimizer.z_loss=1e-4", "optimizer.noise_scale_every=10")


@pytest.mark.parametrize("name", ["streaming-diloco", "noloco", "async-diloco"])
def test_a_rewind_needs_rounds_that_are_waited_for(name: str):
    with pytest.raises(
        ConfigError, match=r"island 0: optimizer\.spikes\.action: .* set action to skip"
    ):
        check(REWIND, file=f"methods/{name}.yaml")


def test_the_noise_scale_needs_two_sequences_in_a_step():
    one = ["optimizer.tokens_per_step=256", "island.micro_batch=1", "islands=[{ranks: 1}]"]
    check(*one)
    with pytest.raises(
        ConfigError, match=r"noise_scale_every needs two sequences in a step, .* is 256"
    ):
        check(*one, "optimizer.noise_scale_every=10")


OWN = "model={name: tests.own.models:GatedConv, options: {num_layers: 4}}"


def test_an_own_model_has_no_z_loss():
    with pytest.raises(ConfigError, match=r"optimizer\.z_loss: the loss of an own model"):
        check(OWN, "optimizer.z_loss=0.1")


def test_an_own_model_has_no_dropout_of_ours():
    with pytest.raises(
        ConfigError, match=r"optimizer\.dropout: got 0\.1, .*; set it to 0, and use a dropout in"
    ):
        check(OWN, "optimizer.dropout=0.1")


def test_dropout_of_everything_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.dropout.*1\.0|optimizer\.dropout.*0\.99"):
        check("optimizer.dropout=1.0")
