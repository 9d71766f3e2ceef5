"""The flags of `diloco mesh` and what they mean."""

import re
from dataclasses import dataclass

from diloco.errors import ConfigError
from diloco.planning.mesh.seconds import Hardware, find_hardware

UNITS = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
UNITS |= {"KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "TIB": 1024**4}


@dataclass(frozen=True, kw_only=True)
class MeshRequest:
    """Flags of the command line as they are written; None if a flag is not given."""

    index: int = 0
    memory: str | None = None
    gpu: str | None = None
    fabric: str | None = None


def find_requested_hardware(request: MeshRequest) -> Hardware | None:
    """Return the GPUs of --gpu with the links of --fabric; None without --gpu. Raises
    ConfigError.
    """
    if request.gpu is None:
        if request.fabric is not None:
            raise ConfigError(
                "--fabric needs --gpu: it sets how fast the links between nodes of these GPUs are; "
                "give --gpu, too"
            )
        return None
    return find_hardware(request.gpu, request.fabric)


def find_limit(request: MeshRequest, hardware: Hardware | None) -> int | None:
    """Return the bytes that a step may take: --memory, or else the GPU's; None if neither is given.
    Raises ConfigError.
    """
    if request.memory is not None:
        return parse_bytes("--memory", request.memory)
    return None if hardware is None else int(hardware.gpu.memory_bytes)


def parse_bytes(option: str, text: str) -> int:
    """Parse `80GB`, `79.6 GiB` or `500 MB` into bytes. Raises ConfigError, which names the
    option.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise ConfigError(
            f"{option}: got {text!r}; allowed: a number with a unit, B kB MB GB TB (powers of "
            "1000) or KiB MiB GiB TiB (of 1024), for example 80GB"
        )
    return int(float(match[1]) * UNITS[match[2].upper()])
