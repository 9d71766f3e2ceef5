"""Which GPUs of one machine each island gets. No GPU is needed: only their names count."""

import sys

import pytest

from diloco.config.schema import IslandConfig, parse_config
from diloco.errors import ConfigError
from diloco.runtime.devices.cuda_driver import Card
from diloco.runtime.devices.gpus import SHARERS, count_sharers
from diloco.runtime.devices.shares import (
    GpuShares,
    check_shares,
    describe_shares,
    share_first_gpu,
    share_gpus,
)
from diloco.simulate.fleet import Fleet, start_child
from diloco.simulate.launch import count_baseline_ranks

DTYPES = "auto", "bfloat16"


def islands(*ranks: int, device: str = "auto") -> list[IslandConfig]:
    return [
        IslandConfig.model_validate({"index": k, "ranks": n, "device": device})
        for k, n in enumerate(ranks)
    ]


def test_each_island_gets_gpus_of_its_own():
    shares = share_gpus(islands(2, 1), ["0", "1", "2", "3"])
    assert [shares.environment(index) for index in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2"},
    ]
    assert shares.spare == ("3",)


def test_islands_with_more_ranks_than_gpus_see_none_and_a_line_says_so():
    shares = share_gpus(islands(2, 2), ["0", "1"])
    assert [shares.environment(index) for index in range(2)] == [{"CUDA_VISIBLE_DEVICES": ""}] * 2
    assert "4 ranks together and this machine 2 GPUs" in "".join(
        describe_shares(islands(2, 2), shares, 2)
    )


def test_no_line_is_said_on_a_machine_without_gpus_or_with_enough():
    for gpus in ([], ["0", "1", "2", "3"]):
        assert not list(describe_shares(islands(2, 2), share_gpus(islands(2, 2), gpus), len(gpus)))


def test_an_island_on_the_cpu_takes_no_gpu_from_the_others():
    mixed = [*islands(4, device="cpu"), *islands(2, device="cuda")]
    assert share_gpus(mixed, ["GPU-a", "GPU-b"]).by_island == {0: (), 1: ("GPU-a", "GPU-b")}


def test_islands_that_ask_for_more_gpus_than_there_are_are_refused_before_anything_starts():
    with pytest.raises(
        ConfigError, match=r"4 ranks of the islands together, and torch finds 3 GPUs"
    ):
        share_gpus(islands(2, 2, device="cuda"), ["0", "1", "2"])


def test_an_island_that_joins_gets_the_gpus_that_are_left_and_keeps_them():
    shares = share_gpus(islands(2), ["0", "1", "2", "3"])
    joiner = islands(2)[0]
    shares.give_spare(1, joiner)
    shares.give_spare(1, joiner)
    shares.give_spare(2, joiner)
    assert (shares.by_island[1], shares.by_island[2]) == (("2", "3"), ())


def test_an_island_that_is_started_again_sees_the_same_gpus(tmp_path):
    fleet = Fleet(tmp_path, [], gpus=share_gpus(islands(1, 1), ["0", "1"]))
    command = [
        sys.executable,
        "-S",
        "-c",
        "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])",
    ]
    fleet.islands[1] = start_child(fleet, 1, "island-1", command, tmp_path / "log.txt")
    fleet.islands[1].process.wait(60)
    fleet.restart(1)
    fleet.islands[1].process.wait(60)
    assert (tmp_path / "log.txt").read_text().splitlines() == ["sees 1", "sees 1"]


def test_islands_of_one_rank_share_the_gpus_if_there_are_too_few_and_a_line_says_so():
    for device in ("auto", "cuda"):
        asking = islands(1, 1, 1, device=device)
        shares = share_gpus(asking, ["4", "5"])
        assert [shares.by_island[index] for index in range(3)] == [("4",), ("5",), ("4",)]
        assert shares.environment(2) == {"CUDA_VISIBLE_DEVICES": "4", SHARERS: "2"}
        assert shares.environment(1) == {"CUDA_VISIBLE_DEVICES": "5"}
        (line,) = describe_shares(asking, shares, 2)
        assert line.startswith("3 islands of one rank share 2 GPUs:")


def test_islands_share_no_gpu_if_there_is_one_for_each():
    assert not share_gpus(islands(1, 1), ["0", "1"]).is_shared


def test_an_island_of_several_ranks_shares_no_gpu():
    assert share_gpus(islands(1, 2), ["0", "1"]).by_island == {0: (), 1: ()}
    with pytest.raises(ConfigError, match="torch finds 2 GPUs"):
        share_gpus(islands(1, 2, device="cuda"), ["0", "1"])


def test_islands_that_must_compute_on_cuda_share_where_the_others_cannot():
    mixed = [*islands(1, 1, device="cuda"), *islands(2)]
    shares = share_gpus(mixed, ["0"])
    assert shares.by_island == {0: ("0",), 1: ("0",), 2: ()}
    assert len(list(describe_shares(mixed, shares, 1))) == 2


def test_an_island_that_joins_shares_the_gpu_that_fewest_have():
    shares = share_gpus(islands(1, 1, 1), ["0", "1"])
    shares.give_spare(3, islands(1)[0])
    shares.give_spare(4, islands(2)[0])
    assert (shares.by_island[3], shares.by_island[4]) == (("1",), ())
    assert shares.environment(1)[SHARERS] == "2", (
        "the island that was alone there is told when it starts again"
    )


def test_an_island_that_chooses_its_own_settings_shares_no_gpu():
    choosing = IslandConfig.model_validate({"auto": ["micro_batch"]})
    alone = share_gpus([choosing], ["0"])
    check_shares([choosing], alone, {})
    alone.give_spare(1, choosing)
    assert alone.by_island[1] == ()
    together = [choosing, *islands(1)]
    for shares in (share_gpus(together, ["0"]), share_first_gpu(together, ["0"])):
        with pytest.raises(
            ConfigError,
            match=r"^island.auto of 'island-0' .* 2 islands share one .*island.auto=\[\]",
        ):
            check_shares(together, shares, {})
    check_shares(together, share_first_gpu(together, []), {})


def test_an_island_that_wants_bf16_is_refused_only_if_its_own_gpu_lacks_it():
    cards = {"0": Card("Tesla T4", (7, 5)), "1": Card("NVIDIA A100-SXM4-40GB", (8, 0))}
    asking = [
        IslandConfig.model_validate({"index": k, "compute_dtype": dtype})
        for k, dtype in enumerate(DTYPES)
    ]
    check_shares(asking, GpuShares({0: ("0",), 1: ("1",)}), cards)
    with pytest.raises(ConfigError, match=r"'island-1' is 'bfloat16', and its GPU .Tesla T4"):
        check_shares(asking, GpuShares({0: ("1",), 1: ("0",)}), cards)


def test_a_process_knows_how_many_islands_have_its_gpu(monkeypatch):
    assert count_sharers() == 1
    monkeypatch.setenv(SHARERS, "3")
    assert count_sharers() == 3


@pytest.mark.parametrize(
    ("listed", "num_gpus", "ranks"),
    [
        ("[{ranks: 1}, {ranks: 1}, {ranks: 1}]", 1, 1),
        ("[{ranks: 1}, {ranks: 1}]", 2, 2),
        ("[{ranks: 1}, {ranks: 1}]", 0, 2),
        ("[{ranks: 2}, {ranks: 2}]", 2, 4),  # all compute on the CPU, and so does the baseline
        ("[{ranks: 2, device: cuda}, {ranks: 2, device: cpu}]", 2, 2),
    ],
)
def test_a_baseline_has_no_more_ranks_than_gpus_where_the_islands_compute_on_gpus(
    listed, num_gpus, ranks
):
    config = parse_config(f"islands: {listed}", ["outer.transport=gloo"])
    each = [config.for_island(index) for index in range(len(config.islands))]
    shares = share_gpus(each, [str(number) for number in range(num_gpus)])
    assert count_baseline_ranks(config, shares, num_gpus) == ranks
