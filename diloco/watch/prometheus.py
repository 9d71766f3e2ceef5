"""Write the state of a run in Prometheus' text format."""

from collections.abc import Mapping, Sequence
from typing import Any

from diloco.overview.incidents import SEVERITIES

GAUGES = {
    "step": "Inner steps made.",
    "round": "Committed rounds of the run after the island's last commit.",
    "tokens_per_second": "Tokens per second in the last inner step.",
    "loss": "Loss of the last inner step, nats per token.",
    "heldout_loss": "Held-out loss of the global params, nats per token.",
    "round_seconds": "Seconds per round, over the last committed rounds.",
    "utilisation": "Share of the last committed rounds' time in inner steps.",
    "reduce_rate": "Bits per second sent in the reduces of the last committed rounds.",
    "last_record": "Unix time of the last record.",
}
COUNTERS = {
    "tokens": "Tokens of all inner steps made.",
    "committed": "Rounds committed.",
    "aborted": "Attempts aborted.",
    "bytes_sent": "Bytes sent to other islands.",
}


INCIDENTS = "diloco_incidents_total"
"""Has a sample for each kind, also for kinds without an incident: their first one is then an
increase.
"""


def metrics_text(states: Sequence[Mapping[str, Any]]) -> str:
    """Return one metric family per figure, with one sample for each island of each run that has the
    figure.

    `states`: results of `state_now`.
    """
    lines: list[str] = []
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter")):
        for name, help_text in names.items():
            family = f"diloco_{name}_total" if kind == "counter" else f"diloco_{name}"
            lines += [f"# HELP {family} {help_text}", f"# TYPE {family} {kind}"]
            lines += [
                f'{family}{{run="{escape(state["name"])}",island="{escape(island["name"])}"}} '
                f"{island[name]!r}"
                for state in states
                for island in state["islands"]
                if island[name] is not None
            ]
    lines += [f"# HELP {INCIDENTS} Incidents of the run by kind.", f"# TYPE {INCIDENTS} counter"]
    lines += [
        f'{INCIDENTS}{{run="{escape(state["name"])}",kind="{escape(kind)}"}} '
        f"{state['incident_counts'].get(kind, 0)}"
        for state in states
        for kind in SEVERITIES
    ]
    return "\n".join(lines) + "\n"


def escape(label: str) -> str:
    """Return a label's value with the format's reserved characters escaped."""
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
