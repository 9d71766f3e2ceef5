"""The exit status says whether to start a rank again."""

import pytest

from diloco.cli.exit import exit_status
from diloco.errors import FINAL_STATUS, ConfigError
from outer.errors import InputError, OuterError


@pytest.mark.parametrize(
    "refusal", [ConfigError("another config"), InputError("the name is taken")]
)
def test_a_final_refusal_of_a_rank_has_a_status_of_its_own(monkeypatch, refusal):
    monkeypatch.setenv("RANK", "0")
    assert exit_status(refusal) == FINAL_STATUS
    monkeypatch.delenv("RANK")
    assert exit_status(refusal) == 2, "a command of the user's"


def test_what_may_succeed_at_another_try_has_status_1(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert exit_status(OuterError("the network failed")) == 1
