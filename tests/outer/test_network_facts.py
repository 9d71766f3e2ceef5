"""Each network has its facts in one place, and no code asks for a network by its name."""

import re
from pathlib import Path
from typing import get_args

from outer.config import NETWORKS, OuterConfig
from outer.connect.opening import OPENERS

ROOT = Path(__file__).parents[2]
BY_NAME = re.compile(r"transport\s*(==|!=|in|not in)\s*[\"'({\[]")


def test_every_value_of_the_setting_has_facts_and_an_opener():
    allowed = get_args(OuterConfig.model_fields["transport"].annotation)
    assert set(allowed) == set(NETWORKS) == set(OPENERS)


def test_no_source_file_compares_the_transport_with_a_name():
    sources = [path for top in ("diloco", "inner", "outer") for path in (ROOT / top).rglob("*.py")]
    assert [
        str(path.relative_to(ROOT)) for path in sources if BY_NAME.search(path.read_text())
    ] == []


def test_networks_that_leave_the_process_say_how_to_be_reached():
    assert [
        name
        for name, facts in NETWORKS.items()
        if facts.leaves_process and not facts.listening_cure
    ] == []
