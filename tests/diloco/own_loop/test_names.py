"""The names and the order of an island's parameters, as its ranks have parts of the model."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from diloco.config.from_swarm import parse_swarm_config, swarm_text
from diloco.config.overrides import differing_param
from diloco.config.schema import RunConfig
from diloco.own_loop.model.names import clean_name, merge_orders
from diloco.own_loop.model.params import list_names, trained_params
from inner.param_spec import ParamSpec

WHOLE = [
    *(
        "embed.weight",
        "layers.0.norm.weight",
        "layers.0.attention.wq.weight",
        "layers.0.dense.weight",
    ),
    *(
        f"layers.{number}.{name}"
        for number in range(1, 12)
        for name in ("norm.weight", "attention.wq.weight", "moe.w1")
    ),
    *("norm.weight", "head.weight"),
]


def of_layers(numbers: range, *others: str) -> list[str]:
    return [
        name
        for name in WHOLE
        if name in others or any(name.startswith(f"layers.{n}.") for n in numbers)
    ]


@pytest.mark.parametrize(
    "orders",
    [
        pytest.param([WHOLE, WHOLE], id="copies"),
        pytest.param(
            [of_layers(range(6), "embed.weight"), of_layers(range(6, 12), *WHOLE[-2:])],
            id="two stages",
        ),
        pytest.param(
            [of_layers(range(0, 12, 2), "embed.weight"), of_layers(range(1, 12, 2), *WHOLE[-2:])],
            id="interleaved",
        ),
        pytest.param(
            [of_layers(range(1, 12, 2), *WHOLE[-2:]), of_layers(range(0, 12, 2), "embed.weight")],
            id="turned",
        ),
        pytest.param(
            [["embed.weight"], of_layers(range(12)), ["norm.weight", "head.weight"]],
            id="ends alone",
        ),
    ],
)
def test_the_order_is_that_of_the_whole_model_on_every_layout(orders: list[list[str]]) -> None:
    assert merge_orders(orders) == WHOLE


def test_orders_that_contradict_each_other_still_give_one_order() -> None:
    assert merge_orders([["a", "b"], ["b", "a"]]) == ["a", "b"]


def test_wrappers_leave_the_names() -> None:
    assert clean_name("_orig_mod.a._checkpoint_wrapped_module._orig_mod.b") == "a.b"
    model = nn.Sequential(
        checkpoint_wrapper(nn.Sequential(nn.Linear(1, 1))), torch.compile(nn.Linear(1, 1))
    )
    assert [spec.name for spec in trained_params(model).specs] == [
        "0.0.weight",
        "0.0.bias",
        "1.weight",
        "1.bias",
    ]


def test_a_parameter_that_two_parts_share_is_one() -> None:
    first, last = nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2, bias=False))
    last[0].weight = first.weight
    assert [spec.name for spec in trained_params([first, last]).specs] == ["weight"]


def specs(*names: str) -> list[ParamSpec]:
    return [ParamSpec(name, (2, 3)) for name in names]


@pytest.mark.parametrize(
    "ours, theirs, expected",
    [
        (["a.w", "a.x", "b"], ["a.w", "a.y", "b"], "here 'a.x [2, 3]', in the run 'a.y [2, 3]'"),
        (["a.w", "b"], ["a.w"], "here 'b [2, 3]', in the run none"),
        ([], ["a.w"], "here none, in the run 'a.w [2, 3]'"),
    ],
)
def test_the_first_parameter_that_differs_is_named(
    ours: list[str], theirs: list[str], expected: str
) -> None:
    line = differing_param(list_names(specs(*ours)), list_names(specs(*theirs)))
    assert line == f"the first parameter that differs: {expected}"


@pytest.mark.parametrize("entry", ["", "x", "-1:x", "99999999999:x", "\u00b2:x", "5:", ":"])
def test_an_entry_of_a_stranger_is_only_text(entry: str) -> None:
    assert "in the run '" in differing_param(["0:a"], [entry])


def test_names_of_a_large_model_have_room_in_the_configs_text() -> None:
    names = [
        f"model.layers.{layer}.self_attn.{name}.weight" for layer in range(200) for name in "qkvo"
    ]
    run = RunConfig(params="many", param_names=list_names(specs(*names * 30)))
    assert 500 < len(run.param_names) < len(names) * 30
    assert parse_swarm_config(swarm_text(run)) == run
