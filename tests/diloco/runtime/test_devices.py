"""Which device a rank computes on. No GPU is needed: the choice depends on their number only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from diloco.config.schema import IslandConfig
from diloco.errors import ConfigError
from diloco.runtime.devices import choose_device, explain_cpu, explain_shares, list_gpus, share_gpus
from diloco.runtime.process_group import check_same_device
from diloco.simulate.fleet import Fleet, start_child

ROOT = Path(__file__).parents[3]


def islands(*ranks: int, device: str = "auto") -> list[IslandConfig]:
    return [IslandConfig.model_validate({"index": k, "ranks": n, "device": device}) for k, n in enumerate(ranks)]


@pytest.mark.parametrize(
    ("setting", "local_rank", "num_local_ranks", "num_gpus", "device"),
    [
        ("auto", 0, 1, 0, "cpu"),
        ("auto", 0, 1, 1, "cuda:0"),
        ("auto", 7, 8, 8, "cuda:7"),
        ("auto", 0, 2, 1, "cpu"),  # the other rank has no GPU, and one island computes on one kind of device
        ("auto", 1, 2, 1, "cpu"),
        ("cpu", 0, 1, 8, "cpu"),
        ("cuda", 1, 2, 8, "cuda:1"),
    ],
)
def test_a_rank_gets_a_gpu_if_there_is_one_for_each_rank_of_its_node(
    setting, local_rank, num_local_ranks, num_gpus, device
):
    assert choose_device(setting, local_rank, num_local_ranks, num_gpus) == device


def test_cuda_without_a_gpu_for_each_rank_is_refused_with_both_numbers_and_a_cure():
    with pytest.raises(ConfigError, match=r"2 ranks.* 1 GPUs.*island.ranks=1 or set island.device to auto or cpu"):
        choose_device("cuda", 0, 2, 1)


def test_auto_says_why_it_is_the_cpu():
    assert explain_cpu("auto", 2, 2) is None
    assert explain_cpu("cpu", 1, 0) is None
    assert "no GPU" in (explain_cpu("auto", 1, 0) or "")
    assert "1 GPUs for 2 ranks" in (explain_cpu("auto", 2, 1) or "")


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
    assert "4 ranks together and this machine 2 GPUs" in (explain_shares(islands(2, 2), ["0", "1"]) or "")


def test_no_line_is_said_on_a_machine_without_gpus_or_with_enough():
    assert explain_shares(islands(2, 2), []) is None
    assert explain_shares(islands(2, 2), ["0", "1", "2", "3"]) is None


def test_an_island_on_the_cpu_takes_no_gpu_from_the_others():
    mixed = [*islands(4, device="cpu"), *islands(2, device="cuda")]
    assert share_gpus(mixed, ["GPU-a", "GPU-b"]).by_island == {0: (), 1: ("GPU-a", "GPU-b")}


def test_islands_that_ask_for_more_gpus_than_there_are_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"4 ranks of the islands together, and torch finds 3 GPUs"):
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
    command = [sys.executable, "-S", "-c", "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])"]
    fleet.islands[1] = start_child(fleet, 1, "island-1", command, tmp_path / "log.txt")
    fleet.islands[1].process.wait(60)
    fleet.restart(1)
    fleet.islands[1].process.wait(60)
    assert (tmp_path / "log.txt").read_text().splitlines() == ["sees 1", "sees 1"]


def test_nodes_with_different_devices_are_refused():
    store = dist.HashStore()
    check_same_device(store, 0, "cuda:0")
    check_same_device(store, 1, "cuda:1")
    with pytest.raises(ConfigError, match="rank 2 of the island computes on cpu, and rank 0 on cuda"):
        check_same_device(store, 2, "cpu")


def test_the_tests_see_no_gpu_of_the_machine():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert list_gpus() == []
    assert torch.cuda.device_count() == 0


@pytest.mark.parametrize("command", ["launch", "simulate"])
def test_a_command_refuses_cuda_on_a_machine_without_gpus_before_it_starts_a_rank(command, tmp_path):
    words = [sys.executable, "-m", "diloco", command, "configs/quickstart.yaml", "island.device=cuda"]
    ended = subprocess.run(
        [*words, f"island.run_dir={tmp_path}"], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert ended.returncode != 0
    assert "torch finds 0 GPUs" in " ".join(ended.stderr.split())
    assert list(tmp_path.iterdir()) == []
