"""`diloco doctor --strict`: which settings leave a run open to a member that lies."""

import re
from pathlib import Path

import pytest

from diloco.config.schema import parse_config
from diloco.doctor.strict_checks import check_strict
from diloco.swarm.visit import LocalIsland
from outer.identity.island_key import KEY_FILE, load_island_key
from tests.diloco.doctor.visits import troubles
from tests.swarm import TINY

SECURITY = Path(__file__).parents[3] / "docs" / "security.md"
STRICT = [
    "outer.transport=tls",
    "outer.start_islands=4",
    "outer.quorum=3",
    "outer.audit=0.1",
    "island.run_key_file=run.key",
]


def findings(folder: Path, *overrides: str, own_is_listed: bool = True) -> list[tuple[str, str]]:
    """What is not ok about a strict run with these changes, on a machine whose island has a key."""
    places = [f"island.run_dir={folder}"]
    config = parse_config(TINY, [*STRICT, *places])
    own = load_island_key(config.for_island(0).folder(config.name) / KEY_FILE).public
    listed = own if own_is_listed else "0a" * 32
    config = parse_config(TINY, [*STRICT, *places, f"island.allow=[{listed}]", *overrides])
    local = LocalIsland(config.run, config.for_island(0), config.outer.transport)
    return troubles(list(check_strict(local, config.run)))


def test_a_strict_run_is_in_order(tmp_path: Path):
    assert findings(tmp_path) == []


def test_the_recipe_of_the_documentation_is_what_is_checked(tmp_path: Path):
    text = SECURITY.read_text()
    block = re.search(r"## A strict run\n.*?\n\n(    outer:.*?)\n\n", text, re.DOTALL)
    assert block is not None
    recipe = re.sub(r"^    ", "", block[1], flags=re.MULTILINE)
    config = parse_config(
        recipe + "\nname: strict\nmodel: {preset: 1m}\n", [f"island.run_dir={tmp_path}"]
    )
    local = LocalIsland(config.run, config.for_island(0), config.outer.transport)
    assert troubles(list(check_strict(local, config.run))) == []
    assert len(recipe.splitlines()) <= 10


@pytest.mark.parametrize(
    ("override", "level", "name"),
    [
        ("outer.transport=gloo", "FAILED", "outer.transport"),
        ("outer.quorum=2", "FAILED", "outer.quorum"),
        ("outer.below_quorum=continue", "FAILED", "outer.below_quorum"),
        ("outer.audit=0", "FAILED", "outer.audit"),
        ("outer.merge.refuse_norm_ratio=null", "FAILED", "outer.merge"),
        ("island.run_key_file=null", "FAILED", "island.run_key_file"),
        ("island.allow=[]", "FAILED", "island.allow"),
        ("island.checkpoint.accept_unsigned=true", "FAILED", "accept_unsigned"),
        ("island.allow_imports=[somebody.code]", "warning", "allow_imports"),
    ],
)
def test_what_leaves_a_run_open_is_named(tmp_path: Path, override: str, level: str, name: str):
    assert findings(tmp_path, override) == [(level, name)]


def test_a_list_without_this_islands_own_key_is_found(tmp_path: Path):
    assert findings(tmp_path, own_is_listed=False) == [("FAILED", "island.allow")]
