"""A tiny experiment for tests: two rows of a model of 35k parameters, on text of Python's standard
library.
"""

from pathlib import Path
from typing import Any

import yaml

TINY: dict[str, Any] = {
    "name": "tiny",
    "about": "Does it work?",
    "base": {
        "model": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64},
        "data": {"source": "files", "seq_len": 32, "heldout_fraction": 0.3},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2, "schedule": "cosine"},
        "outer": {
            "inner_steps": 4,
            "codec": "bf16",
            "optimizer": {"lr": 0.7, "momentum": 0.9, "nesterov": True},
        },
        "evaluate": {"tokens": 512},
        "island": {"micro_batch": 2},
    },
    "overrides": {"step_tokens": 256, "tokens": 6144, "evaluations": 3, "islands": 2},
    "axes": [{"outer.inner_steps": [4, 8]}],
    "seeds": [0, 1],
}
TEXT = (
    "def add(a, b):\n    return a + b\n\n\nclass Point:\n    def __init__(self, x, y):\n       "
    " self.x, self.y = x, y\n"
)


def write_tiny(folder: Path, **changes: Any) -> Path:
    """The file of the tiny experiment with other values, beside its text."""
    (folder / "text").mkdir(exist_ok=True)
    (folder / "text" / "a.py").write_text(TEXT * 300)
    values = {**TINY, **changes}
    places = {"data.paths": [str(folder / "text")], "island.cache_dir": str(folder / "cache")}
    values["overrides"] = {**values["overrides"], **places}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
