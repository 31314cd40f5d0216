"""Know how the collectives of each c10d backend behave, and refuse settings under which a lost worker would end the others."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

__all__ = ["Traits", "has_gloo_for_cpu", "names_by_device", "prepare_environment", "register", "traits_of", "with_gloo"]


@dataclass(frozen=True)
class Traits:
    """Behaviour of a c10d backend that decides how its groups are used and ended.

    Attributes:
        is_asynchronous: collectives return before their results exist, and raise no error when a peer is lost.
        is_abortable: a group is ended by an abort, because its connections cannot be shut down from outside.
    """

    is_asynchronous: bool
    is_abortable: bool


_KNOWN = {"gloo": Traits(False, False), "nccl": Traits(True, True)}


def register(name: str, traits: Traits) -> None:
    """Declare the behaviour of a further backend, one that `torch.distributed.Backend.register_backend` knows."""
    _KNOWN[name.lower()] = traits


def with_gloo(backend: str) -> str:
    """Return the backend of a round's group as torch takes it: `nccl` gets gloo for the script's own tensors on the CPU.

    Raises:
        ValueError: the behaviour of a backend is not known.
    """
    backend = backend.lower()  # as torch takes it
    for name in _names(backend):
        if name not in _KNOWN:
            raise ValueError(
                f"process groups of the backend {backend!r} cannot be used in a live job, as nothing is known of {name!r}: "
                f"use one of {', '.join(sorted(_KNOWN))}, or call lightning_dlrover.rdzv.group.backends.register first"
            )
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


def traits_of(backend: str) -> Traits:
    """Return the behaviour of a group: that of its backends together."""
    parts = [_KNOWN[name] for name in _names(backend)]
    return Traits(any(part.is_asynchronous for part in parts), any(part.is_abortable for part in parts))


def has_gloo_for_cpu(backend: str) -> bool:
    """Whether tensors on the CPU travel through gloo."""
    return backend == "gloo" or "cpu:gloo" in backend.split(",")


def names_by_device(backend: str) -> dict[str, str]:
    """Return the backend of each device type; `""` stands for all devices."""
    pairs = [part.rpartition(":") for part in backend.split(",")]
    return {device: name for device, _, name in pairs}


def _names(backend: str) -> list[str]:
    return [name.lower() for name in names_by_device(backend).values()]


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Make NCCL leave a lost worker to us: its watchdog would end each survivor before the membership knows of the loss.

    torch's agent sets `TORCH_NCCL_ASYNC_ERROR_HANDLING=1` in every worker, so that value says nothing about the user's wish.

    Raises:
        ValueError: the user has chosen a value that would end survivors.
    """
    for name, harmless in _HARMLESS.items():
        value = environ.get(name)
        if value is not None and value.strip().lower() not in harmless:
            raise ValueError(
                f"{name}={value} makes NCCL end this process when another worker is lost, so the job would not survive a loss: "
                f"remove {name} from the environment"
            )
    environ.update(_NEEDED)
    environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # channels are opened while a communicator connects, not at its first use


_OFF = frozenset(("0", "n", "no", "f", "false", ""))

_HARMLESS: Mapping[str, frozenset[str]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _OFF | {"1"},
    "NCCL_ASYNC_ERROR_HANDLING": _OFF,
    "TORCH_NCCL_ENABLE_MONITORING": _OFF,
    "TORCH_NCCL_PROPAGATE_ERROR": _OFF,
    "TORCH_NCCL_DESYNC_DEBUG": _OFF,  # it and the next one switch the watchdog on, whatever TORCH_NCCL_ASYNC_ERROR_HANDLING is
    "TORCH_DISTRIBUTED_DEBUG": frozenset(("", "off", "info")),
}
"""Values of torch's variables with which a worker survives the loss of another one (torch/csrc/distributed/c10d, NCCLUtils)."""

_NEEDED: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog neither aborts groups nor throws
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nothing ends the process while the watchdog waits for an abort
    # After an error the watchdog gives this monitor time to write a dump: four times as long, 60 s by default, for each
    # collective in flight. Whoever drops the group waits for that.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # After each error the watchdog writes to the store of rank 0, so that all write a dump. After a loss of rank 0 each attempt
    # fails, and the watchdog collects a C++ traceback for each collective in flight.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
