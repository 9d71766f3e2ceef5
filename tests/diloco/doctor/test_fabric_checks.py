"""Settings of NCCL and gloo are compared with the interfaces and adapters that the machine has."""

import resource
from pathlib import Path

import pytest

from diloco.doctor.fabric_checks import (
    check_fabric,
    check_locked_memory,
    check_shared_memory,
    selects,
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


PORT = "sys/class/infiniband/{}/ports/1/"
FILES = {
    "sys/class/net/lo/operstate": "unknown\n",
    "sys/class/net/eth0/operstate": "up\n",
    "sys/class/net/eth1/operstate": "down\n",
    PORT.format("mlx5_0") + "state": "4: ACTIVE\n",
    PORT.format("mlx5_0") + "rate": "400 Gb/sec (4X NDR)\n",
    PORT.format("mlx5_1") + "state": "1: DOWN\n",
    PORT.format("mlx5_1") + "rate": "10 Gb/sec\n",
}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return write(tmp_path, FILES)


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0,ib0", ["eth0", "ib0"]),
        ("^eth", ["ib0", "lo"]),
        ("^=eth0", ["eth1", "ib0", "lo"]),
    ],
)
def test_a_list_of_nccl_chooses_names_as_nccl_does(setting: str, names: list[str]) -> None:
    assert [name for name in ("eth0", "eth1", "ib0", "lo") if selects(setting)(name)] == names


@pytest.mark.parametrize(
    ("settings", "level", "says"),
    [
        ({"NCCL_SOCKET_IFNAME": "=eth0"}, "ok", "NCCL_SOCKET_IFNAME==eth0: eth0"),
        (
            {"NCCL_SOCKET_IFNAME": "bond"},
            "FAILED",
            "names no interface of this machine; it has eth0, eth1, lo",
        ),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "FAILED", "eth1 is down"),
        ({"NCCL_IB_HCA": "mlx5_0"}, "ok", "mlx5_0:1 400 Gb/sec (4X NDR)"),
        ({"NCCL_IB_HCA": "=mlx5_0:1"}, "ok", "mlx5_0:1 400 Gb/sec (4X NDR)"),
        (
            {"NCCL_IB_HCA": "mlx4"},
            "FAILED",
            "names no adapter of this machine; it has mlx5_0:1, mlx5_1:1",
        ),
        ({"NCCL_IB_HCA": "mlx5_1"}, "warning", "mlx5_1:1 is DOWN"),
        ({}, "warning", "mlx5_0:1 400 Gb/sec (4X NDR); not active: mlx5_1:1"),
        ({"NCCL_IB_DISABLE": "1"}, "warning", "NCCL leaves mlx5_0:1, mlx5_1:1 alone and uses TCP"),
        (
            {"NCCL_IB_TIMEOUT": "50"},
            "warning",
            "NCCL_IB_TIMEOUT=50; allowed: a whole number from 0 to 31",
        ),
    ],
)
def test_what_nccl_would_use_is_named(
    settings: dict[str, str], level: str, says: str, node: Path
) -> None:
    checks = list(check_fabric(settings, node, has_gpus=False))
    assert [check.level for check in checks if says in check.text] == [level], checks


def test_the_machines_own_file_of_nccl_is_read_and_outranked(node: Path) -> None:
    write(node, {"etc/nccl.conf": "# of the site\nNCCL_IB_HCA = mlx4\n"})
    assert "NCCL_IB_HCA=mlx4" in " ".join(
        check.text for check in check_fabric({}, node, has_gpus=False)
    )
    environment = {"NCCL_IB_HCA": "mlx5_0"}
    assert "mlx4" not in " ".join(
        check.text for check in check_fabric(environment, node, has_gpus=False)
    )


def test_a_machine_without_adapters_has_one_line(tmp_path: Path) -> None:
    (check,) = check_fabric({}, tmp_path, has_gpus=False)
    assert check.level == "ok"
    (check,) = check_fabric({"NCCL_IB_HCA": "mlx5"}, tmp_path, has_gpus=False)
    assert check.level == "warning" and "has no adapter" in check.text


def test_a_limit_of_locked_memory_is_told(node: Path) -> None:
    (check,) = check_locked_memory(65536)
    assert check.level == "warning" and "ulimit -l unlimited" in check.text
    assert list(check_locked_memory(resource.RLIM_INFINITY)) == []


def test_a_machine_without_shared_memory_is_left_alone(tmp_path: Path) -> None:
    assert list(check_shared_memory(tmp_path)) == []
