"""Counts the bytes of all tensors that exist, on any device, and what collectives send."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_resize = torch.UntypedStorage.resize_


class TensorMemory(TorchDispatchMode):
    """The peak of what is allocated while it is active, beyond `held`.

    Args:
        held: Tensors that exist already.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._bytes = self.peak_bytes = 0
        self.collectives: dict[str, int] = {}
        """Bytes of each kind of collective, counted whole: of what is gathered, or of what is added up."""
        for tensor in held:
            self._note(tensor)
        self.held_bytes = self.peak_bytes

    @contextmanager
    def counting(self) -> Iterator[None]:
        """FSDP frees gathered weights by making their storage empty, which no dispatch shows."""

        def resize(storage: torch.UntypedStorage, size: int) -> object:
            resized = _resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, size)
            return resized

        with patch.object(torch.UntypedStorage, "resize_", resize), self:
            yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            sent = max((x.numel() * x.element_size() for x in tree_leaves(args) if isinstance(x, Tensor)), default=0)
            name = func.overloadpacket.__name__
            self.collectives[name] = self.collectives.get(name, 0) + sent
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage._cdata not in self._sizes and storage.device.type != "meta":
            weakref.finalize(storage, self._forget, storage._cdata)
            self._set(storage._cdata, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self._bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _forget(self, key: int) -> None:
        self._bytes -= self._sizes.pop(key, 0)
