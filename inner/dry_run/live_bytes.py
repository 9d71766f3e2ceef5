"""Count the bytes of all live tensors on one type of device, now and at the peak."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_RESIZE = torch.UntypedStorage.resize_
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


class LiveBytes(TorchDispatchMode):
    """Counts bytes during this thread's operations inside `with LiveBytes(alive, "cpu") as live`.
    The tensors `alive` exist before.
    """

    def __init__(self, alive: Iterable[Tensor], device_type: str) -> None:
        super().__init__()
        self.now = self.peak = 0
        """Number of bytes."""
        self._device_type = device_type
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._bytes: dict[int, int] = {}
        self._see(list(alive))

    def __enter__(self) -> "LiveBytes":
        # FSDP frees gathered weights by this method.
        torch.UntypedStorage.resize_ = lambda storage, size: self._resize(storage, size)  # pyright: ignore
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = _RESIZE
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first; its operations then come back here.
        return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation on plain tensors and count the tensors that it reads and returns."""
        out = func(*args, **kwargs)
        self._see([args, out])
        return out

    def _see(self, values: Any) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device_type:
                storage = plain_tensor(tensor).untyped_storage()
                key = storage._cdata
                if key not in self._storages:
                    self._storages[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))
                self._count(storage)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        self.now += size - self._bytes.get(key, 0)
        self._bytes[key] = size
        self.peak = max(self.peak, self.now)

    def _resize(self, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        _RESIZE(storage, size)
        if storage._cdata in self._storages:
            self._count(storage)
        return storage

    def _forget(self, key: int) -> None:
        self._storages.pop(key, None)
        self.now -= self._bytes.pop(key, 0)


def plain_tensor(tensor: Tensor) -> Tensor:
    """Return the plain tensor inside a DTensor or an asynchronous tensor."""
    while type(tensor) not in _PLAIN:
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor.elem  # pyright: ignore
    return tensor
