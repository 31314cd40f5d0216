"""A short program of fixed work, run between steps: its time shows how fast the machine is at that moment."""

from __future__ import annotations

import time

import torch
from torch.nn import functional as F

__all__ = ["ReferenceProgram"]

MATRIX = 256
ROWS, ROW_VALUES = 131_072, 32  # 16 MiB
IDS = (512, 8)


class ReferenceProgram:
    """One matrix multiply and some random rows of a table: about a millisecond on one core."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._matrix = torch.full((MATRIX, MATRIX), 1 / MATRIX, device=device)
        self._table = torch.ones(ROWS, ROW_VALUES, device=device)
        self._ids = torch.randint(ROWS, IDS, generator=torch.Generator().manual_seed(0)).to(device)

    def seconds(self) -> float:
        """Run the program once; return its time."""
        with torch.no_grad():
            self._settle()
            began = time.perf_counter()
            torch.mm(self._matrix, self._matrix)
            F.embedding_bag(self._ids, self._table, mode="sum")
            self._settle()
            return time.perf_counter() - began

    def _settle(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()
