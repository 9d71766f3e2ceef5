"""What the plan and the summary say of the bytes of experts."""

from dataclasses import replace

import pytest

from diloco.config.schema import parse_config
from diloco.planning.expert_traffic import list_sent, share_of_experts
from diloco.report.summary import find_expert_share
from inner.measure.param_specs import averaged_specs
from inner.model.sizes import PRESETS
from outer.config import OuterConfig
from outer.cost import round_bytes

SPECS = averaged_specs(PRESETS["1m-experts"])
"""Three layers of eight experts behind a dense one."""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"audit": 0.5},
        {"experts": {"every": 4, "codec": "int4"}},
        {"merge": {"experts": "routed"}, "fragments": 3},
    ],
    ids=str,
)
def test_bytes_by_content_add_up_to_those_of_the_rounds(changes: dict[str, object]) -> None:
    outer = OuterConfig(**{"rounds": 4, "codec": "bf16", "start_islands": 4, **changes})
    rounds = round_bytes(outer, SPECS, 4)
    per_cycle = sum(each.sent_bytes for each in rounds) / len(rounds) * outer.fragments
    *layers, group, experts, rest = list_sent(outer, SPECS, 4)
    assert experts.num_bytes + rest.num_bytes == pytest.approx(per_cycle, rel=1e-3)
    assert group.num_bytes <= sum(each.num_bytes for each in layers)
    assert share_of_experts(outer, SPECS, 4) == pytest.approx(
        experts.num_bytes / per_cycle, rel=1e-3
    )


def test_experts_in_every_fourth_round_are_a_quarter_of_the_bytes() -> None:
    always, seldom = (
        list_sent(
            OuterConfig.model_validate({"rounds": 4, "codec": "bf16", "experts": {"every": every}}),
            SPECS,
            4,
        )
        for every in (1, 4)
    )
    assert seldom[-2].num_bytes == pytest.approx(always[-2].num_bytes / 4, rel=1e-3)
    assert seldom[-1].num_bytes == pytest.approx(always[-1].num_bytes, rel=1e-3)


def test_a_dense_model_has_no_such_lines() -> None:
    dense = [replace(spec, name=spec.name.replace("experts", "parts")) for spec in SPECS]
    assert list_sent(OuterConfig(), dense, 4) == []


def test_the_summary_has_the_share_of_a_mixture_of_bytes_only() -> None:
    run = parse_config("model: {preset: 1m-experts}").run
    assert find_expert_share(run, 2) == pytest.approx(
        share_of_experts(run.outer, SPECS, 2), rel=0.02
    )
    assert find_expert_share(parse_config("model: {preset: 1m}").run, 2) is None
    tokenised = run.model_copy(
        update={"data": run.data.model_copy(update={"tokenizer": "some/tokenizer"})}
    )
    assert find_expert_share(tokenised, 2) is None and find_expert_share(None, 2) is None
