"""A torch device that computes nothing. Tensors on it are created in a FakeTensorMode, which gives
them shapes only.

torch has one slot for devices from outside of torch (PrivateUse1), and this device uses it. A fake
"cuda" would not work: a torch without CUDA cannot run a backward there, and cannot open the streams
that FSDP asks for. Mixing tensors of this device with CPU tensors is an error, as on a real device.
"""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import backend_registration

from inner.errors import InputError

DEVICE_TYPE = "dryrun"
_is_registered = False
WAITS: Counter[str] = Counter()
"""Number of times that the host has waited for all earlier work of the device, by what it waited
for."""


class _Event:
    """A point in a stream, which is always reached."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None:
        WAITS["event"] += 1

    def query(self) -> bool:
        return True


class _Stream:
    """A queue of work that is always empty."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.device = torch.device(DEVICE_TYPE, 0)

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None:
        WAITS["stream"] += 1

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: Any) -> None: ...


class _Backend:
    """The functions that torch expects of a device module such as `torch.cuda`."""

    Stream = _Stream
    Event = _Event

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...
    def synchronize(self, device: Any = None) -> None:
        WAITS["device"] += 1

    def manual_seed_all(self, seed: int) -> None: ...
    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream()

    def stream(self, stream: _Stream) -> _Stream:
        return stream

    def device(self, device: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None: ...
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def register() -> None:
    """Register the device with torch for the rest of this process. Raises InputError if this
    version of torch cannot do that.
    """
    global _is_registered
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        raise InputError(f"a dry run needs torch 2.12 or later, but this is {torch.__version__}")
    if not _is_registered:
        setup(DEVICE_TYPE, backend_module=_Backend())
        _is_registered = True
