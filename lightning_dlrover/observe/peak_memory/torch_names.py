"""The private names of torch that shape propagation depends on. `check` finds those that an installed release lacks."""

from __future__ import annotations

import functools

from lightning_dlrover.private_names import MissingNamesError, check_names

try:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map_only
except ImportError as error:
    raise MissingNamesError("torch", [str(error)]) from error

__all__ = ["NAMES", "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "check", "tree_leaves", "tree_map_only"]

NAMES: dict[str, tuple[str, ...]] = {
    "torch._subclasses.fake_tensor": ("FakeTensor", "FakeTensorMode"),
    "torch.utils._python_dispatch": ("TorchDispatchMode",),
    "torch.utils._pytree": ("tree_leaves", "tree_map_only"),
}


@functools.cache
def check() -> None:
    """Raise `MissingNamesError` for the names that the installed torch lacks."""
    check_names("torch", NAMES)
