"""summary.json: the main figures of a run. summary_table.py formats them as a table."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.config.check import count_experts_per_token, model_specs
from diloco.config.schema import RunConfig
from diloco.overview.overview import account_of, describe_islands, find_overview
from diloco.overview.traffic import data_parallel_bytes_per_step
from diloco.records.figures import combine
from diloco.records.kept_config import read_plan
from diloco.records.run_folder import IslandRecords, RunRecords, read_run
from diloco.report.data_account import data_account
from inner.files import write_atomically
from inner.model.sizes import BYTE_VOCAB_SIZE

SUMMARY = "summary.json"
DATA_PARALLEL_FORMULA = "2 (N-1)/N x 2 bytes x parameters x inner steps, sent by each of N islands"
"""Data-parallel traffic: a bf16 ring all-reduce of the gradients at every inner step."""

Summary = dict[str, Any]


def summarise(run_dir: Path, *others: Path) -> Summary:
    """Return the run's figures, ready for JSON, None where unknown.

    Raises InputError without a run.
    """
    return summarise_records(read_run(run_dir, *others))


def write_summary(run: RunRecords, out: Path | None = None) -> Summary:
    """Write summary.json into `out`, by default the run's folder, and return its contents."""
    summary = summarise_records(run)
    write_atomically(
        (out or run.run_dir) / SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n"
    )
    return summary


def summarise_records(run: RunRecords) -> Summary:
    """Summarise records that have already been read."""
    plan = replace(read_plan(run.run_dir), facts=run.facts)
    account = account_of(run)
    overview = find_overview(account, plan)
    summary: Summary = {
        "name": plan.name,
        "headline": overview.head[0],
        "since": overview.since,
        "num_params": run.facts.num_params if run.facts else None,
        "num_islands": run.num_islands,
        "islands_read": len(run.islands),
        "islands_unread": run.unread_islands,
        "bigram_loss": run.facts.bigram_loss if run.facts else None,
        **training_figures(run.islands, account.disagreeing_rounds),
        **data_account(run.islands),
        **describe_islands(account),
        "expert_bytes_share": find_expert_share(plan.config, run.num_islands),
        "inner_traffic": {
            island.name: {axis: [sent, last.planned.get(axis)] for axis, sent in last.sent.items()}
            for island in run.islands
            for last in island.traffics[-1:]
        },
        "faults": dict(Counter(fault.kind for fault in run.faults if not fault.is_end)),
        "links": run.facts.links or None if run.facts else None,
        "wire_bytes_sent": run.facts.wire_bytes_sent if run.facts else None,
        "wire_bytes_received": run.facts.wire_bytes_received if run.facts else None,
        "data_parallel_bytes": data_parallel_bytes(run),
        "data_parallel_formula": DATA_PARALLEL_FORMULA,
        "baseline": None,
        "loss_ratio": None,
    }
    if run.baseline is not None:
        baseline = summary["baseline"] = training_figures([run.baseline])
        ours = summary["final_eval_loss"]
        theirs = baseline["final_eval_loss"]
        summary["loss_ratio"] = ours / theirs if ours and theirs else None
    return summary


def training_figures(islands: Sequence[IslandRecords], disagreeing: Sequence[int] = ()) -> Summary:
    """Return the figures that a run and its baseline have in common. `disagreeing`: rounds whose
    participants disagree.
    """
    latest = [island.latest for island in islands]
    run = combine(latest)
    figures = {each.figures.name: each.figures for each in latest}
    has_own = any(record.is_own for island in islands for record in island.rounds)
    # With gossip each island's own params are evaluated: those evaluated after the most rounds
    # count.
    own = [
        each
        for each in figures.values()
        if has_own and each.heldout_round == run.heldout_round >= 0
    ]
    return {
        "final_eval_loss": mean_of_known([each.heldout_loss for each in own])
        if has_own
        else run.heldout_loss,
        "final_bits_per_byte": mean_of_known([each.bits_per_byte for each in own])
        if has_own
        else run.bits_per_byte,
        "final_eval_losses": {each.name: each.heldout_loss for each in own} if has_own else None,
        "final_source_losses": find_source_losses(islands),
        "eval_losses": mean_eval_losses(islands),
        "tokens": run.tokens,
        "source_tokens": dict(sum((each.source_tokens for each in latest), Counter[str]())),
        "steps": {island.name: len(island.steps) for island in islands},
        **count_committed_steps(islands),
        **noise_figures(islands),
        **expert_figures(islands),
        "skipped_steps": {island.name: sum(s.skipped for s in island.steps) for island in islands},
        "rounds_committed": run.committed,
        "rounds_aborted": run.aborted,
        "bytes_sent": {name: each.bytes_sent for name, each in figures.items()},
        "bytes_received": {name: each.bytes_received for name, each in figures.items()},
        "digests_equal": not disagreeing if run.committed and not has_own else None,
        "rounds_disagreeing": list(disagreeing),
        "seconds": wall_seconds(islands),
    }


def noise_figures(islands: Sequence[IslandRecords]) -> Summary:
    """Return the gradient noise scale in tokens, and the tokens per step of all islands together.

    The scale is from the second half of its measurements. It is None if nothing was measured, or if
    an average is not positive.
    """
    halves = [[s for s in island.steps if s.noise_scale] for island in islands]
    measured = [step for half in halves for step in half[len(half) // 2 :]]
    signal = mean_of_known([step.noise_scale["signal"] for step in measured])
    noise = mean_of_known([step.noise_scale["noise"] for step in measured])
    step_tokens = [
        (island.latest.figures.tokens or 0) / len(island.steps)
        for island in islands
        if island.steps
    ]
    scale = (
        noise / signal
        if signal is not None and noise is not None and min(signal, noise) > 0
        else None
    )
    return {"noise_scale": scale, "step_tokens": sum(step_tokens) or None}


def expert_figures(islands: Sequence[IslandRecords]) -> Summary:
    """Return the mean load of the fullest expert by layer, over the second half of the steps, and
    the number of dropped choices. Empty and None for a model without experts.
    """
    halves = [[s for s in island.steps if s.expert_loads] for island in islands]
    late = [step for half in halves for step in half[len(half) // 2 :]]
    layers = dict.fromkeys(layer for step in late for layer in step.expert_loads)
    loads = {
        layer: mean_of_known([step.expert_loads.get(layer) for step in late]) for layer in layers
    }
    dropped = sum(step.routing.get("dropped", 0) for half in halves for step in half)
    return {"expert_loads": loads, "experts_dropped": int(dropped) if late else None}


def find_expert_share(config: RunConfig | None, num_islands: int) -> float | None:
    """Return the share of experts in the bytes that an island sends, by formula. None without
    experts, and if config or vocabulary are not known.
    """
    if config is None or config.outer.gossip is not None or count_experts_per_token(config) == 0:
        return None
    if config.data.tokenizer != "bytes" and config.model.vocab_size is None:
        return None
    # Imported here because it imports torch, which a summary of a dense model does not need.
    from diloco.planning.expert_traffic import share_of_experts

    return share_of_experts(
        config.outer, model_specs(config, config.model.vocab_size or BYTE_VOCAB_SIZE), num_islands
    )


def count_committed_steps(islands: Sequence[IslandRecords]) -> Summary:
    """Count the inner steps and those in committed rounds.

    Return their ratio, too, None if not recorded.
    """
    trained = sum(len(island.steps) for island in islands)
    committed = sum(
        record.steps for island in islands for record in island.rounds if record.committed
    )
    share = committed / trained if trained and committed else None
    return {"steps_trained": trained, "steps_committed": committed, "committed_share": share}


def find_source_losses(islands: Sequence[IslandRecords]) -> dict[str, float | None]:
    """Return the last held-out loss of each source of a mixture, from any island.

    Empty without a mixture.
    """
    found: dict[str, float | None] = {}
    for record in sorted(
        (e for island in islands for e in island.evals), key=lambda e: (e.round, e.time)
    ):
        found.update(record.source_losses)
    return found


def mean_eval_losses(islands: Sequence[IslandRecords]) -> dict[str, float]:
    """Return the held-out loss before each round, averaged over the islands that measured it.

    Keys are text, as in JSON.
    """
    measured: dict[int, list[float]] = {}
    for record in (record for island in islands for record in island.evals):
        if record.loss is not None:
            measured.setdefault(record.round, []).append(record.loss)
    return {str(number): sum(losses) / len(losses) for number, losses in sorted(measured.items())}


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def data_parallel_bytes(run: RunRecords) -> dict[str, int] | None:
    """Return the bytes that each island would have sent in data-parallel training.

    None without run.json.
    """
    if run.facts is None:
        return None
    per_step = data_parallel_bytes_per_step(run.facts.num_params, run.num_islands)
    return {island.name: round(per_step * len(island.steps)) for island in run.islands}


def wall_seconds(islands: Sequence[IslandRecords]) -> float | None:
    """Return the seconds from the start of the first inner step (or wait) to the last record."""
    spans = [span for island in islands for span in island.spans]
    return max(end for _, end in spans) - min(start for start, _ in spans) if spans else None


def traffic_ratio(summary: Summary) -> float | None:
    """Return the ratio of data-parallel traffic to the run's traffic.

    None if either is zero or unknown.
    """
    sent = total(summary["bytes_sent"])
    would_have = total(summary["data_parallel_bytes"])
    return would_have / sent if sent and would_have else None


def total(by_island: dict[str, int] | None) -> int | None:
    """Return the sum over the islands, or None if it is unknown."""
    return None if by_island is None else sum(by_island.values())
