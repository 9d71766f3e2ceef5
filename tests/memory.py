"""How much memory this process takes, as Linux counts it."""

from pathlib import Path


def reset_peak() -> None:
    """Let this process's largest resident size, VmHWM, begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def read_status(key: str) -> int:
    """Bytes by their name in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
