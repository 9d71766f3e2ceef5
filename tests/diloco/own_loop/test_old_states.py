"""A state that an earlier version has saved: a run of six steps, saved after three, with names of
torch.compile.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

import diloco
from diloco.errors import ConfigError
from tests.diloco.own_loop.loops import finish, small_model

SAVED = Path(__file__).with_name("state_of_6cd429f2.pt")
"""Model, optimizer and Islands after step 3, and the digest at the end of the run; by the commit in
the name.
"""
OUTER = {"transport": "loopback", "rounds": 3, "inner_steps": 2, "start_islands": 1}


def test_an_earlier_versions_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    saved = torch.load(SAVED, weights_only=True)
    inside = small_model(seed=1)
    model = nn.Sequential(torch.compile(inside[0], backend="eager"), *inside[1:])
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(saved["optimizer"])
    config = {"name": "own", "outer": OUTER, "island": {"run_dir": str(tmp_path)}}
    islands = diloco.Islands(config, model, optimizer, state=saved["islands"])
    assert islands.steps == 3
    assert finish(islands, model, optimizer)[1] == saved["digest"]


def test_an_earlier_versions_state_of_another_model_is_refused(tmp_path: Path) -> None:
    saved = torch.load(SAVED, weights_only=True)
    config = {"name": "own", "outer": OUTER, "island": {"run_dir": str(tmp_path)}}
    with pytest.raises(ConfigError, match="the saved state is of a run with the hash"):
        diloco.Islands(config, nn.Linear(4, 8), state=saved["islands"])
