"""The example rules for Prometheus name figures and kinds that /metrics has."""

import re
from pathlib import Path

import yaml

from diloco.overview.incidents import SEVERITIES
from diloco.records.metrics import Metrics
from diloco.watch.prometheus import metrics_text
from diloco.watch.view.run_view import RunView
from diloco.watch.view.state import state_now
from tests.diloco.sample_records import a_round, a_step

RULES = Path(__file__).parents[3] / "docs" / "prometheus-rules.yaml"


def test_the_example_rules_are_about_figures_that_are_served(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "island-0" / "metrics.jsonl")
    for record in (a_step(1), a_round(0), a_round(1, committed=False, cause="timed out")):
        metrics.write(record)
    metrics.close()
    view = RunView(tmp_path)
    view.read()
    served = metrics_text([state_now(view)])
    assert f'diloco_incidents_total{{run="{tmp_path.name}",kind="aborted"}} 1' in served
    expressions = [rule["expr"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]]
    assert len(expressions) == 6
    for name in re.findall(r"diloco_\w+", " ".join(expressions)):
        assert f"# TYPE {name} " in served
    for kinds in re.findall(r'kind=~?"([^"]+)"', " ".join(expressions)):
        assert set(kinds.split("|")) <= set(SEVERITIES)
