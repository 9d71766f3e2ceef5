"""Find the GPUs that torch may use on this machine, or why there are none. Importing this does not
import torch.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from diloco.runtime.devices.cuda_driver import Card, CudaDriver, ask_cuda_driver

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARERS = "DILOCO_GPU_SHARERS"
"""Environment variable: number of islands that share this island's GPU, set by the launcher if it
is above 1."""
DRIVERS = "/dev/nvidiactl", "/dev/dxg", "/dev/kfd"
"""Files of drivers that torch could use: NVIDIA's, WSL's, AMD's. At least one exists if there is
such a driver."""


def list_gpus() -> list[str]:
    """Return the GPUs that torch may use, as CUDA_VISIBLE_DEVICES names them. Initialises none of
    them.
    """
    visible = os.environ.get(VISIBLE)
    if visible == "" or not has_driver():
        return []
    import torch

    if find_driver_problem(torch.version.cuda, ask_cuda_driver()):
        return []
    count = torch.cuda.device_count()
    return (
        [str(number) for number in range(count)] if visible is None else visible.split(",")[:count]
    )


def list_cards() -> tuple[Card, ...]:
    """Return what NVIDIA's driver reports about the GPUs of list_gpus; empty for GPUs of other
    makers.
    """
    driver = ask_cuda_driver() if os.environ.get(VISIBLE) != "" and has_driver() else None
    return driver.cards if driver is not None else ()


def find_obstacle() -> str:
    """Return why torch cannot use any of this machine's GPUs, as part of a sentence; empty without
    a driver.
    """
    if not has_driver():
        return ""
    import torch

    build = f"torch {torch.__version__}", torch.version.cuda or torch.version.hip
    return explain_obstacle(
        os.environ.get(VISIBLE), build, find_driver_problem(torch.version.cuda, ask_cuda_driver())
    )


def explain_obstacle(
    visible: str | None, build: tuple[str, str | None], driver_problem: str
) -> str:
    """Return the obstacle. `visible`: value of CUDA_VISIBLE_DEVICES; `build`: torch and the version
    of CUDA it needs.
    """
    torch_version, cuda = build
    if cuda is None:
        return f"{torch_version} is built for the CPU only; install a build for CUDA"
    if driver_problem:
        return driver_problem
    if visible is None:
        return f"the driver shows none to {torch_version}"
    return f"{VISIBLE} is {visible!r}, which names none of them; unset it, or number them from 0"


def describe_gpus(num_gpus: int) -> str:
    """Return the number of GPUs as text, with the reason if there is a driver and torch can use no
    GPU.
    """
    obstacle = "" if num_gpus else find_obstacle()
    return f"{num_gpus} GPUs ({obstacle})" if obstacle else f"{num_gpus} GPUs"


def find_driver_problem(cuda: str | None, driver: CudaDriver | None) -> str:
    """Return why a torch that is built for CUDA version `cuda` cannot use the driver.

    Empty if it can use the driver or uses another one.
    """
    if cuda is None or driver is None:
        return ""
    newest = ".".join(str(number) for number in driver.cuda)
    # A build for any CUDA version works with a driver for the same major version.
    if int(cuda.split(".")[0]) > driver.cuda[0]:
        return (
            f"the driver {driver.version} supports CUDA {newest}, and this torch needs CUDA "
            f"{cuda}; update the driver, "
            f"or install a torch that is built for CUDA {driver.cuda[0]}"
        )
    return f"the driver {driver.version} does not start: {driver.problem}" if driver.problem else ""


def has_driver(paths: Sequence[str] = DRIVERS) -> bool:
    """Return whether this machine has a driver that torch could use."""
    return any(Path(path).exists() for path in paths)


def count_sharers() -> int:
    """Return the number of islands that share this process's GPU; 1 if this island has it alone."""
    return int(os.environ.get(SHARERS, "1"))
