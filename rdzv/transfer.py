"""Send a Python object with large tensors from one worker to another without copying the tensors.

Both ends are workers of one job on the data plane, so the object itself is pickled; its large tensors travel as they are.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["receive", "send"]

INLINE_BYTES = 4096
"""Smaller tensors travel inside the pickle: a message of their own would cost more than the copy."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._index: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        if not isinstance(obj, torch.Tensor) or obj.layout != torch.strided or obj.nbytes <= INLINE_BYTES:
            return None
        if id(obj) not in self._index:
            self._index[id(obj)] = len(self.tensors)
            self.tensors.append(obj.detach())
        return ("tensor", self._index[id(obj)])


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: tuple[str, int]) -> torch.Tensor:
        return self._tensors[pid[1]]


def send(obj: Any, to_rank: int) -> None:
    """Send `obj` to one worker of the default group, which must call `receive` meanwhile.

    Tensors arrive on the CPU. The caller must not change them until this returns.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(obj)
    tensors = [t.cpu().contiguous() for t in pickler.tensors]
    shapes = [(t.dtype, tuple(t.shape)) for t in tensors]
    header = pickle.dumps((file.getvalue(), shapes), protocol=pickle.HIGHEST_PROTOCOL)
    dist.send(torch.tensor([len(header)], dtype=torch.int64), to_rank)
    dist.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), to_rank)
    pending = [dist.isend(t.flatten().view(torch.uint8), to_rank) for t in tensors]
    for work in pending:
        assert work is not None
        work.wait()


def receive(from_rank: int) -> Any:
    """The object that `from_rank` passes to `send`."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, from_rank)
    buffer = torch.empty(int(size.item()), dtype=torch.uint8)
    dist.recv(buffer, from_rank)
    body, shapes = pickle.loads(buffer.numpy().tobytes())
    # Touched first: new pages cost far more while they are filled from a socket.
    tensors = [torch.empty(shape, dtype=dtype).zero_() for dtype, shape in shapes]
    pending = [dist.irecv(t.flatten().view(torch.uint8), from_rank) for t in tensors]
    for work in pending:
        assert work is not None
        work.wait()
    return _Unpickler(io.BytesIO(body), tensors).load()
