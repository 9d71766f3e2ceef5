"""The model of the round protocol holds what docs/protocol.md promises, and fails without any one
of its rules.
"""

import shutil
from pathlib import Path

import pytest

from tests.protocol_model import check
from tests.protocol_model.configurations import CONFIGURATIONS, LIMITS, MUTATIONS, Configuration

QUICK = [each for each in CONFIGURATIONS if each.is_quick]
QUICK_LIMITS = [each for each in LIMITS if each.is_quick]


def name_of(configuration: Configuration) -> str:
    return configuration.name


@pytest.mark.slow
@pytest.mark.parametrize("configuration", QUICK, ids=name_of)
def test_what_the_page_promises_holds_in_the_model(configuration: Configuration) -> None:
    result = check.check(configuration)
    assert result.verdict == "holds", result.trace
    assert result.num_states > 1


@pytest.mark.slow
@pytest.mark.parametrize("configuration", MUTATIONS, ids=name_of)
def test_without_a_rule_spin_finds_what_it_is_for(configuration: Configuration) -> None:
    assert check.check(configuration).verdict == "violated"


@pytest.mark.slow
@pytest.mark.parametrize("configuration", QUICK_LIMITS, ids=name_of)
def test_what_the_protocol_does_not_give_is_found(configuration: Configuration) -> None:
    assert check.check(configuration).verdict == "violated"


def test_every_word_of_a_configuration_is_one_of_the_model() -> None:
    models = "".join(path.read_text() for path in sorted(check.FOLDER.glob("*.pml")))
    for configuration in (*CONFIGURATIONS, *MUTATIONS, *LIMITS):
        for word in configuration.defines.split():
            assert word.split("=")[0] in models, f"{configuration.name}: the model has no {word}"


def test_the_page_has_a_line_for_every_configuration() -> None:
    page = Path(__file__).parents[2] / "docs" / "protocol-model.md"
    lines = page.read_text()
    missing = [
        each.name
        for each in (*CONFIGURATIONS, *MUTATIONS, *LIMITS)
        if f"`{each.defines}`" not in lines
    ]
    assert not missing


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(check.ToolMissing, match="apt-get install spin"):
        check.check(CONFIGURATIONS[0])
