"""Which device a rank computes on. No GPU is needed: the choice depends on their number only."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from diloco.config.schema import IslandConfig, parse_config
from diloco.errors import ConfigError
from diloco.runtime.devices.choice import choose_device, explain_cpu, fit_compute_dtype
from diloco.runtime.devices.cuda_driver import Card, CudaDriver, ask_cuda_driver
from diloco.runtime.devices.gpus import explain_obstacle, find_driver_problem, list_gpus
from diloco.runtime.process_group import check_same_device, open_process_group
from tests.harness import run_ranks

ROOT = Path(__file__).parents[3]


H100, V100 = Card("NVIDIA H100 80GB HBM3", (9, 0)), Card("Tesla V100-SXM2-16GB", (7, 0))


@pytest.mark.parametrize(
    ("setting", "local_rank", "num_local_ranks", "num_gpus", "device"),
    [
        ("auto", 0, 1, 0, "cpu"),
        ("auto", 0, 1, 1, "cuda:0"),
        ("auto", 7, 8, 8, "cuda:7"),
        (
            "auto",
            0,
            2,
            1,
            "cpu",
        ),  # the other rank has no GPU, and one island computes on one kind of device
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
    with pytest.raises(
        ConfigError, match=r"2 ranks.* 1 GPUs.*island.ranks=1 or set island.device to auto or cpu"
    ):
        choose_device("cuda", 0, 2, 1)


def test_auto_says_why_it_is_the_cpu():
    assert explain_cpu("auto", 2, 2) is None
    assert explain_cpu("cpu", 1, 0) is None
    assert "finds 0 GPUs" in (explain_cpu("auto", 1, 0) or "")
    assert "1 GPUs for 2 ranks" in (explain_cpu("auto", 2, 1) or "")


def test_nodes_with_different_devices_are_refused():
    store = dist.HashStore()
    check_same_device(store, 0, "cuda:0")
    check_same_device(store, 1, "cuda:1")
    with pytest.raises(
        ConfigError, match="rank 2 of the island computes on cpu, and rank 0 on cuda"
    ):
        check_same_device(store, 2, "cpu")


def test_the_tests_see_no_gpu_of_the_machine():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert list_gpus() == []
    assert torch.cuda.device_count() == 0


@pytest.mark.parametrize("command", ["launch", "simulate"])
def test_a_command_refuses_cuda_on_a_machine_without_gpus_before_it_starts_a_rank(
    command, tmp_path
):
    words = [
        sys.executable,
        "-m",
        "diloco",
        command,
        "configs/quickstart.yaml",
        "island.device=cuda",
    ]
    ended = subprocess.run(
        [*words, f"island.run_dir={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode != 0
    assert "torch finds 0 GPUs" in " ".join(ended.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_one_gpu_by_its_number_is_refused_with_how_to_choose_it():
    with pytest.raises(
        ConfigError, match=r"island.device: got 'cuda:3'; allowed: .*CUDA_VISIBLE_DEVICES=3"
    ):
        parse_config("", ["island.device=cuda:3"])


def test_a_card_without_bf16_computes_in_fp32_unless_the_config_asks_for_bf16():
    auto = IslandConfig()
    assert fit_compute_dtype(auto, H100) is auto
    assert fit_compute_dtype(auto, V100).resolve_compute_dtype("cuda:0") == "float32"
    asking = IslandConfig(compute_dtype="bfloat16")
    assert fit_compute_dtype(asking, H100) is asking
    with pytest.raises(
        ConfigError, match=r"'island-0' is 'bfloat16'.*V100.* 7.0\) has no bf16.*float32 or auto"
    ):
        fit_compute_dtype(asking, V100)


@pytest.mark.parametrize(
    ("visible", "build", "driver", "reason"),
    [
        (
            "7",
            "13.0",
            CudaDriver("580.65", (13, 0)),
            "CUDA_VISIBLE_DEVICES is '7', which names none",
        ),
        (None, None, CudaDriver("580.65", (13, 0)), "torch 2 is built for the CPU only"),
        (
            None,
            "13.0",
            CudaDriver("535.129", (12, 2)),
            "535.129 supports CUDA 12.2, and this torch needs CUDA 13.0",
        ),
        (None, "12.6", CudaDriver("535.129", (12, 2), "CUDA_ERROR_SYSTEM_NOT_READY"), "NOT_READY"),
        (None, "13.0", CudaDriver("580.65", (13, 0)), "the driver shows none to torch 2"),
    ],
)
def test_why_a_driver_gives_torch_no_gpu_is_said(visible, build, driver, reason):
    assert reason in explain_obstacle(
        visible, ("torch 2", build), find_driver_problem(build, driver)
    )


def test_a_driver_of_the_same_major_version_is_new_enough():
    assert find_driver_problem("12.8", CudaDriver("535.129", (12, 2))) == ""


DRIVER = """
#include <string.h>
int cuDriverGetVersion(int *v) { *v = 12080; return 0; }
int cuInit(unsigned flags) { return STATUS; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *device, int number) { *device = 70 + number; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    strncpy(name, device == 70 ? "A" : "B", size);
    return 0;
}
int cuDeviceGetAttribute(int *v, int which, int device) {
    *v = which == 76 ? 5 : which - 68 + device - 70;
    return 0;
}
int cuGetErrorName(int status, const char **name) { *name = "CUDA_ERROR_UNKNOWN"; return 0; }
"""
"""A library with the functions of libcuda.so.1 that are called, and two cards of compute capability
7.5 and 8.5.
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
@pytest.mark.parametrize("status", [0, 100, 999])
def test_the_driver_s_library_is_asked_for_version_and_cards(status, tmp_path):
    (tmp_path / "cuda.c").write_text(DRIVER)
    library = str(tmp_path / "libcuda.so")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-DSTATUS={status}", "-o", library, tmp_path / "cuda.c"],
        check=True,
    )
    driver = ask_cuda_driver(library)
    assert driver is not None and driver.cuda == (12, 8)
    assert driver.cards == ((Card("A", (7, 5)), Card("B", (8, 5))) if status == 0 else ())
    assert driver.problem == ("CUDA_ERROR_UNKNOWN" if status == 999 else "")


def test_a_machine_without_the_driver_s_library_is_no_error():
    assert ask_cuda_driver("libcuda-of-nobody.so") is None


def monitoring(_: int, setting: str | None) -> str | None:
    """The variable of NCCL's monitor in an island's only rank, whose user has given it this
    setting.
    """
    name = "TORCH_NCCL_ENABLE_MONITORING"
    os.environ.pop(name, None)
    if setting is not None:
        os.environ[name] = setting
    dist.destroy_process_group()
    with open_process_group(IslandConfig(), "cpu"):
        return os.environ.get(name)


@pytest.mark.parametrize(("setting", "then"), [(None, "0"), ("1", "1")])
def test_nccl_does_not_abort_a_frozen_island_of_one_rank_unless_the_user_wants_it(setting, then):
    assert run_ranks(monitoring, 1, setting) == [then]
