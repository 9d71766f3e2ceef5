"""What `diloco.Islands` refuses before it connects to anybody, and how it says so."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diloco
from diloco.errors import ConfigError
from diloco.own_loop.model.island_model import IslandModel, ModelRules
from diloco.own_loop.model.optimizers import with_moments
from diloco.own_loop.model.params import describe, hold_params, trained_params
from diloco.own_loop.run_config import read_config
from diloco.own_loop.saved_state import parse_state, read_state, state_path, write_state
from outer.space.ranks import RankGroup
from tests.swarm import read_records

TOKENS_10 = ["optimizer.tokens_per_step=10"]
ALONE = {"outer": {"transport": "loopback", "rounds": 2, "inner_steps": 1, "start_islands": 1}}


@pytest.mark.parametrize(
    "values, text",
    [
        ({"model": {"dim": 32}}, "sets model, which `diloco train` follows"),
        ({"optimizer": {"lr": 1e-3}}, "sets optimizer.lr"),
        ({"island": {"cache_dir": "a"}}, "sets island.cache_dir"),
        ({"island": {"cache_dir": "a"}}, "; with `data` also cache_dir, data_paths"),
        ({"data": {"seq_len": 8}}, "data needs optimizer.tokens_per_step"),
        (
            {"data": {"seq_len": 8}, "optimizer": {"tokens_per_step": 12}},
            "is not a multiple of data.seq_len (8)",
        ),
        ({"island": {"micro_batch": 4, "name": "a"}}, "sets island.micro_batch, which"),
        ({"islands": [{"mesh": {"tp": 2}}]}, "sets island.mesh, which"),
        (
            {"outer": {"wait_for": "quorum"}},
            "outer.wait_for: quorum needs optimizer.tokens_per_step",
        ),
        ({"outer": {"rounds": 0}}, "outer.rounds"),
        ({"stages": [{}]}, "sets stages without data"),
        (
            {"data": {"seq_len": 8}, "optimizer": {"tokens_per_step": 8}, "stages": [{"lr": 0.1}]},
            "sets stages[0].lr",
        ),
    ],
)
def test_a_config_that_a_loop_of_ones_own_does_not_follow_is_refused(
    values: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        read_config(values, ())


def test_a_model_in_the_place_of_the_config_is_refused_with_the_order_of_the_arguments() -> None:
    with pytest.raises(
        ConfigError, match=r"is a Linear; allowed: .* Islands\(config, model, optimizer\)"
    ):
        diloco.Islands(nn.Linear(2, 2), "run.yaml")  # type: ignore[arg-type]


def test_overrides_change_the_config() -> None:
    read = read_config(
        ALONE, ["island.index=3", "outer.inner_steps=7", "optimizer.tokens_per_step=100"]
    )
    assert (read.island.label, read.run.outer.inner_steps, read.tokens_per_step) == (
        "island-3",
        7,
        100,
    )


def test_more_ranks_than_the_config_says_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"island\.ranks is 4, and torch\.distributed has 2"):
        read_config({"island": {"ranks": 4}}, ()).with_model("", 2)


@pytest.mark.parametrize(
    "values, text",
    [
        (
            {"outer": {"transport": "tls"}},
            "island.bootstrap: got no address, and 1 more begin with it",
        ),
        (
            {"outer": {"transport": "hivemind"}},
            "island-0 would wait for ever; start `diloco bootstrap` and give",
        ),
        (
            {"outer": {"transport": "loopback"}},
            "outer.transport: got loopback, which no other process reaches",
        ),
        (
            {"island": {"joins": True}, "outer": {"transport": "gloo"}},
            "got no address, and island.joins is true",
        ),
    ],
)
def test_an_island_that_would_wait_for_others_for_ever_is_refused(
    values: dict[str, Any], text: str
) -> None:
    outer = {"start_islands": 2, **values.pop("outer")}
    with pytest.raises(ConfigError, match=re.escape(text)):
        diloco.Islands({"outer": outer} | values, nn.Linear(2, 2))


def test_an_index_that_the_config_does_not_have_is_refused_unless_it_joins() -> None:
    values = ALONE | {"islands": [{}, {}]}
    assert read_config(values, ["island.index=1"]).island.label == "island-1"
    with pytest.raises(
        ConfigError, match=r"island\.index: got 2, and `islands` has the entries 0 to 1; choose"
    ):
        read_config(values, ["island.index=2"])
    assert read_config(values, ["island.index=2", "island.joins=true"]).island.joins


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))


@pytest.mark.parametrize(
    "model, text",
    [
        (nn.Linear(2, 2).requires_grad_(False), "no parameter of the model requires a gradient"),
        (nn.Linear(2, 2).bfloat16(), "'weight' is bfloat16.*torch.autocast"),
        (nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
        (WithEmpty(), r"'nothing' has the shape \(0, 3\)"),
    ],
    ids=["frozen", "bfloat16", "meta", "empty"],
)
def test_a_model_that_islands_cannot_average_is_refused(model: nn.Module, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        trained_params(model)


def test_moments_of_other_optimizers_are_refused() -> None:
    model = nn.Linear(2, 2)
    params = trained_params(model)
    with pytest.raises(ConfigError, match="got the optimizers: SGD"):
        with_moments(params, torch.optim.SGD(model.parameters()))
    with pytest.raises(
        ConfigError, match="do not hold all parameters that require gradients: 'bias' is in none"
    ):
        with_moments(params, torch.optim.AdamW([model.weight]))


class Container(torch.optim.Optimizer):
    """Some optimizers as one, as trainers have them."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        params = [
            param for each in optimizers for group in each.param_groups for param in group["params"]
        ]
        super().__init__(params, {})


def test_of_several_optimizers_in_a_container_only_adamws_moments_are_averaged(
    tmp_path: Path,
) -> None:
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD([model.weight], lr=0.5), torch.optim.AdamW([model.bias])]
    config = {"outer": ALONE["outer"] | {"moments": [1, 1]}, "island": {"run_dir": str(tmp_path)}}
    with diloco.Islands(config, model, Container(optimizers)) as islands:
        while not islands.is_over:
            model(torch.ones(1, 2)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            islands.step(tokens=1)
        assert "; 1 with moments, sha256 of names" in islands.config.run.params
    assert not optimizers[0].state
    assert optimizers[1].state[model.bias]["step"] == 2
    records = read_records(tmp_path / "run" / "island-0" / "metrics.jsonl")
    assert [each["lr"] for each in records if each["kind"] == "step"] == [0.5, 0.5]


def test_a_process_of_several_without_torch_distributed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"WORLD_SIZE is 2 and torch\.distributed is not initialised"
    ):
        diloco.Islands(ALONE, nn.Linear(2, 2))


@pytest.mark.parametrize(
    "state", [{}, {"version": 9}, {"version": 1, "facts": {}, "tensors": [], "place": {}}]
)
def test_a_state_of_something_else_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"not what Islands.state_dict returned|has version 9"):
        parse_state(state)


def test_a_saved_folder_that_has_no_state_of_this_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"islands-0\.safetensors does not exist: .* state of Islands for rank 0"
    ):
        diloco.Islands(ALONE, nn.Linear(2, 2), state=tmp_path)


def test_a_saved_folder_goes_on_only_with_as_many_ranks(tmp_path: Path) -> None:
    with alone(tmp_path / "run") as islands:
        islands.step(tokens=10)
        islands.save(tmp_path / "saved")
        steps, digest = islands.steps, islands.digest
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["islands-0.safetensors"]
    config = {"outer": ALONE["outer"], "island": {"run_dir": str(tmp_path / "other")}}
    with diloco.Islands(
        config, nn.Linear(2, 2), state=tmp_path / "saved", overrides=TOKENS_10
    ) as islands:
        assert (islands.steps, islands.digest) == (steps, digest)
    path = state_path(tmp_path / "saved", 0)
    write_state(read_state(path) | {"ranks": 2}, path)
    with pytest.raises(
        ConfigError, match="is of an island of 2 ranks, and this one has 1: resume with as many"
    ):
        diloco.Islands(config, nn.Linear(2, 2), state=tmp_path / "saved", overrides=TOKENS_10)


class Recomputed(nn.Module):
    """A layer whose name has a word of torch's wrapper for recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = nn.Linear(2, 2)


def test_a_state_with_the_names_of_wrappers_is_read(tmp_path: Path) -> None:
    model = nn.ModuleDict({"10": Recomputed(), "2": nn.Linear(2, 2)})
    before, _ = hold_params(RankGroup(), model, as_before=True)
    config = {"outer": ALONE["outer"], "island": {"run_dir": str(tmp_path / "one")}}
    with diloco.Islands(config, model) as islands:
        assert (
            islands.config.run.params
            == describe(trained_params(model).specs)
            != describe(before.specs)
        )
    rules = ModelRules(was_saved=lambda description: description == describe(before.specs))
    assert IslandModel(RankGroup(), model, None, None, rules).description == describe(before.specs)
    assert before.specs[0].name == "10._checkpoint_wrapped_module.weight"


def alone(tmp_path: Path, **outer: Any) -> diloco.Islands:
    config = {"outer": ALONE["outer"] | outer, "island": {"run_dir": str(tmp_path)}}
    return diloco.Islands(config, nn.Linear(2, 2), overrides=["optimizer.tokens_per_step=10"])


def test_tokens_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with alone(tmp_path) as islands:
        for tokens, text in (
            (-1, "got -1"),
            (1.5, "got 1.5"),
            (11, "more than optimizer.tokens_per_step=10"),
        ):
            with pytest.raises(ValueError, match=text):
                islands.step(tokens=tokens)  # pyright: ignore[reportArgumentType]


def test_a_step_after_the_last_round_is_refused(tmp_path: Path) -> None:
    with alone(tmp_path) as islands:
        while not islands.is_over:
            islands.step(tokens=10)
        with pytest.raises(RuntimeError, match=r"leave the loop when islands\.is_over"):
            islands.step(tokens=10)


def test_the_state_of_another_run_is_refused(tmp_path: Path) -> None:
    with alone(tmp_path / "one") as islands:
        islands.step(tokens=10)
        state = islands.state_dict()
    config = {
        "outer": ALONE["outer"] | {"rounds": 3},
        "island": {"run_dir": str(tmp_path / "other")},
    }
    with pytest.raises(ConfigError, match="the saved state is of a run with the hash"):
        diloco.Islands(config, nn.Linear(2, 2), state=state)


@pytest.mark.parametrize("saves, at_step_4", [(False, True), (True, False)])
def test_saving_lands_the_round_in_flight(tmp_path: Path, saves: bool, at_step_4: bool) -> None:
    with alone(tmp_path, inner_steps=2, delay=2, rounds=3) as islands:
        landed = [islands.step(tokens=10) is not None for _ in range(3)]
        if saves:
            islands.state_dict()
        landed += [islands.step(tokens=10) is not None for _ in range(3)]
        assert islands.is_over
    assert landed == [False, False, False, at_step_4, False, True]


def unfreeze(model: nn.Sequential) -> None:
    model[0].requires_grad_(True)


def replace(model: nn.Sequential) -> None:
    model[1] = nn.Linear(2, 2)


def load_by_assignment(model: nn.Sequential) -> None:
    model.load_state_dict(
        {name: value.clone() for name, value in model.state_dict().items()}, assign=True
    )


def add(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


def remove(model: nn.Sequential) -> None:
    del model[1].bias


def cast(model: nn.Sequential) -> None:
    model.bfloat16()


def freeze(model: nn.Sequential) -> None:
    model[1].requires_grad_(False)


def load(model: nn.Sequential) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def half_frozen(tmp_path: Path, **outer: Any) -> tuple[nn.Sequential, diloco.Islands]:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    config = {
        "outer": ALONE["outer"] | {"inner_steps": 2} | outer,
        "island": {"run_dir": str(tmp_path)},
    }
    return model, diloco.Islands(config, model, overrides=["optimizer.tokens_per_step=10"])


@pytest.mark.parametrize("wait_for", ["all", "quorum"])
@pytest.mark.parametrize(
    "change, text",
    [
        (
            unfreeze,
            r"'0\.weight' requires a gradient, and did not or was not there; '0\.bias' requires",
        ),
        (replace, r"'1\.weight' is another tensor; '1\.bias' is another tensor"),
        (load_by_assignment, r"'1\.weight' is another tensor"),
        (add, r"'2\.weight' requires a gradient, and did not or was not there"),
        (remove, r"'1\.bias' is no longer there"),
        (cast, r"'1\.weight' was float32 \[2, 2\] and is bfloat16 \[2, 2\]"),
    ],
)
def test_other_parameters_than_at_the_start_are_refused_at_the_next_round(
    tmp_path: Path, change: Callable[[nn.Sequential], None], text: str, wait_for: str
) -> None:
    model, islands = half_frozen(tmp_path, wait_for=wait_for)
    with islands:
        islands.step(tokens=10)
        change(model)
        with pytest.raises(
            ConfigError,
            match=rf"^round 0: the model's .*made: {text}.*Make Islands after the change",
        ):
            islands.step(tokens=10)
        assert islands.is_over, "it has left"


@pytest.mark.parametrize("change", [freeze, load])
def test_parameters_that_stay_the_same_tensors_train_on(
    tmp_path: Path, change: Callable[[nn.Sequential], None]
) -> None:
    model, islands = half_frozen(tmp_path)
    with islands:
        change(model)
        while not islands.is_over:
            islands.step(tokens=10)
        assert islands.round == 2


@pytest.mark.parametrize("steps, is_warned", [(0, True), (1, True), (2, False), (4, False)])
def test_a_loop_that_ends_with_nothing_averaged_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int, is_warned: bool
) -> None:
    with alone(tmp_path, inner_steps=2) as islands:
        for _ in range(steps):
            islands.step(tokens=10)
    expected = (
        "nothing that this island has trained was averaged with the others: inner steps that "
        "islands.step counted: "
        f"{steps}, and a round has 2; call islands.step(tokens=...) after each optimizer.step()"
    )
    assert any(text.startswith(expected) for text in caplog.messages) == is_warned


def test_the_report_of_a_round_prints_as_one_line(tmp_path: Path) -> None:
    with alone(tmp_path) as islands:
        report = islands.step(tokens=10)
        digest = islands.digest[:12]
    pattern = (
        r"round 0 attempt \d: committed with island-0; [\d,]+ bytes sent, [\d,]+ received; "
        r"waited \d+\.\d s, "
    )
    assert re.fullmatch(
        pattern + rf"reduced in \d+\.\d s; pseudo-gradient 0; digest {digest}", str(report)
    )
