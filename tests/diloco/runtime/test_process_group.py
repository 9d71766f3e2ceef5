"""How the ranks of an island meet."""

import pytest

from diloco.errors import ConfigError
from diloco.runtime.process_group import require_one_node


def test_an_island_of_several_nodes_over_hivemind_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    require_one_node("hivemind")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    require_one_node("tls")
    with pytest.raises(ConfigError, match=r"2 of this island's 4 ranks are here; set outer.transport=tls"):
        require_one_node("hivemind")
