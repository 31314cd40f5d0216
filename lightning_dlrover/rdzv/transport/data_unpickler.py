"""Keep torch's own object collectives from executing data sent by another worker.

`torch.distributed.all_gather_object` and its relatives unpickle whatever arrives. Torch's checkpoints of several files,
torchrec, torchmetrics and scripts call them. In a worker of a job they accept the same types as `transfer`, and the error for
any other names its class.
"""

from __future__ import annotations

import dataclasses
import pickle
import traceback
from typing import Any

import torch

from lightning_dlrover.rdzv.transport import torch_names, transfer

# Errors of a checkpoint's parts travel with their tracebacks.
_OF_ERRORS: list[Any] = [traceback.StackSummary, traceback.FrameSummary]

# Plans of a checkpoint's parts, and the positions and devices of sharded tensors.
_OF_PARTS = ("torch.distributed.checkpoint.", "torch.distributed._shard.")
_DEVICE_OF_PART = "torch.distributed.remote_device._remote_device"


def accept_only_data() -> None:
    """Replace the unpickler of torch's collectives in this process."""
    torch_names.replace_unpickler(DataUnpickler)


class DataUnpickler(pickle.Unpickler):
    """An unpickler that finds only classes and functions without side effects, and those that the script has allowed.

    Its `load` raises `TransferError` with the name of any other.
    """

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full == "torch.storage._load_from_bytes":
            return transfer.loads  # torch's own runs whatever the bytes name
        if (found := _accepted_by_name().get(full)) is not None:
            return found
        found = transfer.loaded(full)
        if isinstance(found, torch.dtype | torch.layout | torch.memory_format) or transfer.is_plain_class(found):
            return found
        if isinstance(found, type) and module == "builtins" and issubclass(found, BaseException):
            return found
        if full == _DEVICE_OF_PART or (
            isinstance(found, type) and module.startswith(_OF_PARTS) and dataclasses.is_dataclass(found)
        ):
            return found
        raise transfer.RefusedError(full, transfer.advice_for(full))


def _accepted_by_name() -> dict[str, Any]:
    accepted: list[Any] = [*transfer.HARMLESS, *_OF_ERRORS, *torch.serialization.get_safe_globals()]
    named = (each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}") for each in accepted)
    return {**torch_names.accepted_in_files(), **{name: found for found, name in named}}
