"""`diloco prepare` on a mixture, and the run that reads what it has left."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from diloco.config.schema import parse_config
from diloco.errors import ConfigError
from diloco.records.run_folder import read_run
from diloco.report.summary import summarise_records
from diloco.report.summary_table import summary_rows
from diloco.runtime.corpus import data_of
from tests.swarm import TEXT, TINY, swarm

ROOT = Path(__file__).parents[3]


def mixture(folder: Path) -> str:
    """Two sources of 40 files each, 3 to 1, as YAML in one line."""
    entries = []
    for name, weight in (("code", 3), ("prose", 1)):
        (folder / name).mkdir()
        for number in range(40):
            (folder / name / f"{number}.txt").write_text(f"# {name} {number}\n" + TEXT * 4)
        entries.append(
            {"name": name, "weight": weight, "source": "files", "paths": [str(folder / name)]}
        )
    return yaml.safe_dump(entries, default_flow_style=True, width=10**6).strip()


def test_a_run_on_a_mixture_that_was_prepared_records_its_tokens_by_source(tmp_path: Path) -> None:
    settings = ["data.source=python-stdlib", "data.paths=[]", f"data.mixture={mixture(tmp_path)}"]
    config = tmp_path / "run.yaml"
    config.write_text(TINY)
    command = [
        sys.executable,
        "-m",
        "diloco",
        "prepare",
        str(config),
        *settings,
        f"island.cache_dir={tmp_path}/cache",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:2]] == ["code", "prose"]
    prepared = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.bin")}
    with swarm(
        tmp_path, *settings, f"island.cache_dir={tmp_path}/cache", islands=[{"ranks": 1}]
    ) as islands:
        island = islands.start(0)
        island.finish()
        steps = island.records("step")
        assert all(
            sum(step["source_tokens"].values()) == 512 and step["data_seconds"] >= 0
            for step in steps
        )
        held = island.records("eval")[-1]
        summary = summarise_records(read_run(island.folder.parent))
    assert {
        path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.bin")
    } == prepared
    assert sum(summary["source_tokens"].values()) == summary["tokens"] == 512 * len(steps)
    code, prose = (held["source_losses"][name] for name in ("code", "prose"))
    assert summary["final_source_losses"] == {"code": code, "prose": prose}
    assert code != prose and held["loss"] == pytest.approx(0.75 * code + 0.25 * prose)
    labels = {label for label, _, _ in summary_rows(summary)}
    assert {"Tokens by source", "Held-out loss by source"} <= labels


def test_a_mixture_and_paths_of_an_island_are_refused(tmp_path: Path) -> None:
    config = parse_config(TINY, ["data.source=python-stdlib", f"data.mixture={mixture(tmp_path)}"])
    island = config.island.model_copy(update={"data_paths": ("x",)})
    with pytest.raises(ConfigError, match=r"island.data_paths replaces data.paths"):
        data_of(config.run, island)
