"""environment.json: the code, software and hardware that an island was started with.

They make its numbers reproducible. The code's uncommitted changes are in code.diff beside the file.
Importing this module does not import torch.
"""

import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from inner.files import write_atomically

log = logging.getLogger(__name__)

FILE = "environment.json"
DIFF = "code.diff"
MAX_DIFF_BYTES = 1 << 20
GIT_SECONDS = 10.0
MOST_NAMED = 8
"""Most packages that one warning names."""
VARIABLES = (
    "CUDA_",
    "NCCL_",
    "GLOO_",
    "TORCH",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "SLURM_JOB",
    "HF_HUB_",
    "HF_DATASETS_",
)
"""Prefixes of the environment variables that may change a result or its speed."""
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
CHECKOUT = Path(__file__).parents[2]


def write_environment(folder: Path) -> dict[str, str]:
    """Write environment.json and code.diff into the island's folder.

    Return the changes since the last start that can change a result (code and packages), by name.
    """
    before = read_environment(folder)
    now = describe_environment()
    diff = read_diff(CHECKOUT)
    write_atomically(folder / FILE, json.dumps(now | {"command": sys.argv}, indent=1) + "\n")
    if diff:
        write_atomically(folder / DIFF, diff)
    else:
        (folder / DIFF).unlink(missing_ok=True)
    return changes(before, now) if before is not None else {}


def read_environment(folder: Path) -> dict[str, Any] | None:
    """Return the content of the folder's environment.json; None if it is missing or unreadable."""
    with suppress(OSError, ValueError):
        values = json.loads((folder / FILE).read_text())
        return values if isinstance(values, dict) else None
    return None


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return `old -> new` for each of these that differs.

    They are the code's commit, Python, the processor, and the version of each package.
    """
    found = {key: (before.get(key), now.get(key)) for key in ("commit", "python", "processor")}
    packages = before.get("packages"), now.get("packages")
    old, new = (each if isinstance(each, dict) else {} for each in packages)
    found |= {name: (old.get(name), new.get(name)) for name in sorted({*old, *new})}
    return {
        name: f"{first} -> {second}" for name, (first, second) in found.items() if first != second
    }


@cache
def describe_environment() -> dict[str, Any]:
    """Return the code, software and hardware of this process, which all its islands share."""
    commit = git(CHECKOUT, "rev-parse", "HEAD")
    untracked = git(CHECKOUT, "ls-files", "--others", "--exclude-standard")
    return {
        "commit": commit.strip() or None,
        "is_changed": bool(read_diff(CHECKOUT)),
        "untracked": untracked.splitlines()[:100],
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": platform.node(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpu_names(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if is_told(name)},
        "packages": find_packages(),
    }


def find_packages() -> dict[str, str]:
    """Return the versions of the installed packages by name.

    A package whose metadata cannot be read is left out with a warning: its installation was
    interrupted, or is still running.
    """
    found = dict[str, str]()
    unreadable = list[str]()
    for each in distributions():
        try:
            name, number = read_name_and_version(each)
        except Exception:  # noqa: BLE001 - files of other packages may have any defect
            unreadable.append(str(getattr(each, "_path", each)))
        else:
            found.setdefault(name, number)
    if unreadable:
        log.warning(
            "%s lacks packages whose metadata cannot be read: %s",
            FILE,
            ", ".join(unreadable[:MOST_NAMED]),
        )
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def read_name_and_version(package: Distribution) -> tuple[str, str]:
    """A package's name and version, from the head of its metadata. Raises KeyError if one of them
    is missing.

    `Distribution.metadata` would parse the whole text, with the package's description, for each
    package and start.
    """
    text = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
    head = text.partition("\n\n")[0]
    fields = dict(
        line.split(": ", 1)
        for line in head.splitlines()
        if line.startswith(("Name: ", "Version: "))
    )
    return fields["Name"], fields["Version"]


def is_told(name: str) -> bool:
    """Return whether the environment variable is recorded.

    It is if it matters and its name hints at no secret.
    """
    return name.startswith(VARIABLES) and not any(word in name.upper() for word in SECRETS)


@cache
def read_diff(checkout: Path) -> str:
    """Return the uncommitted changes of tracked files, cut at MAX_DIFF_BYTES.

    Empty without a checkout.
    """
    return git(checkout, "diff", "HEAD")[:MAX_DIFF_BYTES]


def git(checkout: Path, *words: str) -> str:
    """Run git and return its output.

    It is empty if git fails or is not installed, or if the folder is not the root of a checkout.
    """
    if not (checkout / ".git").exists():
        return ""
    command = ["git", "--no-optional-locks", "-C", str(checkout), *words]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, timeout=GIT_SECONDS, check=True)
        return done.stdout.decode(errors="replace")
    return ""


def processor_name() -> str:
    """Return the kernel's name of the processor; the processor's architecture if there is none."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def gpu_names() -> list[str]:
    """Return the names of the GPUs if torch is already loaded and sees any. Starts no work on
    them.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
