"""Describe a worker's next collective: its kind, the properties that must be equal on all workers, and the user's line."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

__all__ = ["Place", "Purpose", "details", "place_of", "shown", "tensors_in"]

LIBRARIES = frozenset(
    (
        *("lightning", "lightning_dlrover", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
        *("torch", "torchmetrics", "torchrec", "contextlib", "functools"),
    )
)
"""Top-level packages whose frames are skipped in the search for the user's line."""


@dataclass(frozen=True)
class Place:
    """Place in the program where a collective was called."""

    user: str  # file, line and function of the innermost frame outside of libraries
    caller: str  # function of Lightning or another library that called it on the user's behalf; empty if the user called it
    line: str  # the user's file name and line, without the folder, which may differ between hosts

    def __str__(self) -> str:
        return self.user + (f" (through {self.caller})" if self.caller else "")


@dataclass(frozen=True)
class Purpose:
    """One worker's next action together with all others."""

    kind: str  # kind of action, such as "strategy.reduce"
    details: str = ""  # name, size, type and root, which must be equal on all workers
    place: Place | None = None
    same_line: bool = False  # whether it must be called at the same line on all workers
    any_place: bool = False  # whether `place` serves only the error's text

    @property
    def key(self) -> int:
        """Key of 62 bits, equal for workers that may meet."""
        compared = [self.kind, self.details]
        if self.place is not None and not self.any_place:
            compared += [self.place.caller, self.place.line if self.same_line else ""]
        return int.from_bytes(hashlib.blake2b("\n".join(compared).encode(), digest_size=8).digest(), "big") >> 2

    def __str__(self) -> str:
        return self.kind + (f" of {self.details}" if self.details else "") + (f" at {self.place}" if self.place else "")


def shown(frame: FrameType | None) -> Place:
    """Return the place of a call for error texts only; it is not compared."""
    return Place(place_of(frame).user, "", "")


def place_of(frame: FrameType | None) -> Place:
    """Return the place of a call, given its innermost frame."""
    caller, outermost = "", frame
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        package = name.partition(".")[0]
        if package not in LIBRARIES:
            return Place(_line(frame), caller, f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        if not caller and package not in ("torch", "lightning_dlrover", "contextlib", "functools"):
            # Python 3.10 has the short name only.
            caller = f"{name}.{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"
        outermost, frame = frame, frame.f_back
    return Place(_line(outermost) if outermost is not None else "", caller, "")


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


SIZED = {"all_reduce": 0, "broadcast": 0, "reduce": 0, "all_gather_into_tensor": 0}
"""Position of the argument whose size is equal on all workers. Other operations may use a different size on each worker."""

ROOTS = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to"}


def details(name: str, args: Sequence[Any]) -> str:
    """Return the sizes and types that must be equal on all workers, and the root."""
    root = f"{ROOTS[name]} rank {args[-1].rootRank}" if name in ROOTS and args and hasattr(args[-1], "rootRank") else ""
    sized: Any = args[SIZED[name]] if name in SIZED and args else None
    if name == "all_gather" and args:
        sized = args[0][0] if args[0] else None  # NCCL accepts inputs of unequal sizes, but the outputs are equal
    tensors = list(tensors_in([sized]))
    if not tensors:
        return root
    sizes = [str(tensor.numel()) for tensor in tensors]
    size = sizes[0] if len({*sizes}) == 1 else ", ".join(sizes)
    return f"{size} x {str(tensors[0].dtype).removeprefix('torch.')} {root}".rstrip()


def tensors_in(args: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors in the arguments of a process group's method."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from tensors_in(arg)
