"""Move a job's state between workers as data, never as code: objects with large tensors, buffers, state kept on a host.

Messages are read by `torch.load(weights_only=True)`, which accepts
  - tensors, plain Python values, and a few harmless classes of the standard library and of numpy;
  - enums and dataclasses of modules that this process has imported;
  - classes that the script has allowed with `torch.serialization.add_safe_globals`.

All workers run one script, so a receiver also accepts the classes and functions in its own state (`names_in`). An attacker with
access to a connection between two workers can make a worker fail or send it wrong data. The attacker cannot make it run code
that its own state does not name.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import enum
import fractions
import io
import itertools
import json
import logging
import os
import pathlib
import re
import sys
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dlrover.rdzv.membership.member import RoundEndedError
from lightning_dlrover.rdzv.transport import waits

INLINE_BYTES = 4096
"""Minimum bytes of a tensor with a message of its own. Smaller ones are copied into the object's message, which costs less."""

# Constructors of these classes only store their arguments.
HARMLESS: list[Any] = [
    *(argparse.Namespace, complex, frozenset, range, slice, fractions.Fraction, uuid.UUID),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
    *(bool, bytes, dict, float, int, list, set, str, tuple),
    *(np.ndarray, np.dtype, np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]),
    *(type(np.dtype(code)) for code in "?bhilqBHILQefdgFDGSUmM"),
]


class TransferError(RuntimeError):
    """Another worker has sent an object that is not accepted from others."""


class RefusedError(TransferError):
    """An object holds a class or function that is not accepted.

    Attributes:
        name: the class or function.
        advice: the next move.
    """

    def __init__(self, name: str, advice: str) -> None:
        super().__init__(f"the state of another worker contains {name}, a type not allowed in transfers; {advice}")
        self.name = name
        self.advice = advice


@dataclass(frozen=True)
class Packed:
    """An object ready to be sent: a message with empty places for its large tensors, and these tensors."""

    body: bytes
    tensors: list[torch.Tensor]


def pack(obj: Any) -> Packed:
    """Prepare an object for `send`, to check that it can be sent before a receiver waits for it.

    Raises:
        TransferError: a part of it cannot be serialized, such as a lambda, a lock or an open file.
    """
    return Packed(*_packed(obj))


def send(obj: Any, to_rank: int) -> None:
    """Send an object, or the result of `pack`, to one worker of the default group, which must call `receive` at the same time.

    Tensors arrive on the CPU. The caller must not change them until this returns.
    """
    packed = obj if isinstance(obj, Packed) else pack(obj)
    tensors = [t.cpu().contiguous() for t in packed.tensors]
    group = round_group()
    waits.wait_for(group.send([torch.tensor([len(packed.body)], dtype=torch.int64)], to_rank, 0))
    waits.wait_for(group.send([torch.frombuffer(bytearray(packed.body), dtype=torch.uint8)], to_rank, 0))
    pending = [group.send([t.flatten().view(torch.uint8)], to_rank, 0) for t in tensors]
    for work in pending:
        waits.wait_for(work)


def receive(from_rank: int, classes: Sequence[type] = (), names: Collection[str] = ()) -> Any:
    """Receive the object that `from_rank` passes to `send`.

    Args:
        classes: classes accepted in addition to plain data.
        names: classes and functions accepted by name, see `names_in`.

    Raises:
        TransferError: it holds a class that is not allowed.
    """
    group = round_group()
    size = torch.zeros(1, dtype=torch.int64)
    waits.wait_for(group.recv([size], from_rank, 0))
    body = torch.empty(int(size.item()), dtype=torch.uint8)
    waits.wait_for(group.recv([body], from_rank, 0))
    outline = loads(body.numpy().tobytes(), classes, names)
    tensors: list[torch.Tensor] = []

    def fill(place: torch.Tensor) -> torch.Tensor:
        if not place.is_meta:
            return place
        # Touch the pages first: new pages cost far more while they are filled from a socket.
        tensors.append(torch.empty(place.shape, dtype=place.dtype).zero_())
        return tensors[-1]

    obj = _replaced(outline, fill, {})
    pending = [group.recv([t.flatten().view(torch.uint8)], from_rank, 0) for t in tensors]
    for work in pending:
        waits.wait_for(work)
    return obj


def all_gather(obj: Any) -> list[Any]:
    """Return the small objects of all workers of the default group, by rank. All of them must call this.

    Raises:
        TransferError: one of them holds a class that is not allowed.
    """
    body, large = _packed(obj, inline_bytes=None)
    assert not large
    size = torch.tensor([len(body)], dtype=torch.int64)
    group = round_group()
    sizes = [torch.zeros_like(size) for _ in range(group.size())]
    waits.wait_for(group.allgather([sizes], [size]))
    padded = torch.zeros(max(int(s.item()) for s in sizes), dtype=torch.uint8)
    padded[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    bodies = [torch.empty_like(padded) for _ in sizes]
    waits.wait_for(group.allgather([bodies], [padded]))
    return [loads(b[: int(s.item())].numpy().tobytes()) for b, s in zip(bodies, sizes, strict=True)]


def gather_from(ranks: Sequence[int], obj: Any) -> dict[int, Any]:
    """Return the small objects of some workers of the default group, by rank. All workers must call this with the same ranks.

    A worker moves about twice the bytes of these objects, however many workers there are.

    Raises:
        TransferError: one of them holds a class that is not allowed.
    """
    if not ranks:
        return {}
    me = round_group().rank()
    body = dumps(obj) if me in ranks else b""
    sizes = largest([len(body) if rank == me else 0 for rank in ranks])
    ends = [*itertools.accumulate(sizes)]
    bodies = torch.zeros(ends[-1], dtype=torch.uint8)
    places = {rank: slice(end - size, end) for rank, size, end in zip(ranks, sizes, ends, strict=True)}
    if body:
        bodies[places[me]] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    _take_largest(bodies)  # the others have zeros there
    return {rank: loads(bodies[place].numpy().tobytes()) for rank, place in places.items()}


def largest(numbers: Sequence[int]) -> list[int]:
    """Return, for each place, the largest number of all workers of the default group. All of them must call this."""
    found = torch.tensor(numbers, dtype=torch.int64)
    _take_largest(found)
    return [int(each) for each in found]


def _take_largest(tensor: torch.Tensor) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    waits.wait_for(round_group().allreduce([tensor], options))


def broadcast(tensor: torch.Tensor) -> None:
    """Copy rank 0's values into a tensor on the CPU of all workers of the default group. All of them must call this."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    waits.wait_for(round_group().broadcast([tensor], options))


def broadcast_object(obj: Any, source: int = 0, device: torch.device | None = None) -> Any:
    """Return the object of one worker of the default group. All of them must call this.

    Args:
        obj: taken from the worker of rank `source`, ignored on the others.
        device: where tensors arrive that are on another device than the CPU at the source.

    Raises:
        TransferError: the object holds a class that is not allowed; raised on all workers.
    """
    group = round_group()
    options = dist.BroadcastOptions()
    options.rootRank = source
    is_source = group.rank() == source
    kind, body = _message_of(obj, source) if is_source else (_Kind.JSON, b"")
    # Most objects are a name or a flag, and need this one message.
    head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
    if is_source:
        first = kind.value + len(body).to_bytes(8, "little") + body[: _HEAD_BYTES - 9]
        head[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
    waits.wait_for(group.broadcast([head], options))
    kind = _Kind(bytes(head[:1].tolist()))
    size = int.from_bytes(bytes(head[1:9].tolist()), "little")
    if size > _HEAD_BYTES - 9:
        whole = torch.frombuffer(bytearray(body), dtype=torch.uint8) if is_source else torch.empty(size, dtype=torch.uint8)
        waits.wait_for(group.broadcast([whole], options))
        body = whole.numpy().tobytes() if not is_source else body
    else:
        body = head[9 : 9 + size].numpy().tobytes()
    if kind is _Kind.ERROR:
        raise TransferError(body.decode(errors="replace"))
    if is_source:
        return obj
    if kind is _Kind.JSON:
        return json.loads(body)
    received = loads(body)
    return received if kind is _Kind.DATA else _replaced(received, lambda tensor: tensor.to(device), {})


_HEAD_BYTES = 512


class _Kind(enum.Enum):
    JSON = b"j"
    DATA = b"d"
    DEVICE_DATA = b"g"  # data with tensors on a device of the source
    ERROR = b"e"


def _message_of(obj: Any, source: int) -> tuple[_Kind, bytes]:
    if obj is None or type(obj) in (bool, int, float, str):
        with contextlib.suppress(ValueError):  # half of a surrogate pair
            return _Kind.JSON, json.dumps(obj).encode()
    try:
        body = dumps(obj)
        loads(body)
    except RefusedError as error:
        text = f"rank {source} broadcasts an object that contains {error.name}, a type not allowed in transfers; {error.advice}"
        return _Kind.ERROR, text.encode(errors="replace")
    except TransferError as error:
        name = f"{type(obj).__module__}.{type(obj).__qualname__}"
        text = f"rank {source} broadcasts an object of {name} that is not plain data: {error.__cause__ or error}"
        return _Kind.ERROR, text.encode(errors="replace")
    devices: set[str] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        devices.add(tensor.device.type)
        return tensor

    _replaced(obj, note, {})
    return _Kind.DATA if devices <= {"cpu"} else _Kind.DEVICE_DATA, body


def barrier() -> None:
    """Wait until all workers of the round have called this. The streams of their devices may still be busy."""
    waits.wait_for(round_group().allreduce([torch.zeros(1)]))


def travel_in(group: Any | None) -> None:
    """Use `group` from here on: one of gloo among the workers of the default group, with the same ranks.

    It is the default group itself, unless that has another backend for tensors on the CPU. None drops the group with its round.
    """
    global _round_group
    _round_group = group


_round_group: Any = None


def round_group() -> Any:
    """Return the group of the current round. Raises `RoundEndedError` if there is none."""
    group = _round_group if _round_group is not None else dist.group.WORLD
    if group is None:
        raise RoundEndedError("the round has ended")
    return group


def dumps(obj: Any) -> bytes:
    """Serialize any object that could be sent."""
    return _packed(obj, inline_bytes=None)[0]


def loads(data: bytes, classes: Sequence[type] = (), names: Collection[str] = ()) -> Any:
    """Return the object that `dumps` serialized.

    Args:
        classes: classes accepted in addition to plain data.
        names: classes and functions accepted by name, see `names_in`.

    Raises:
        TransferError: it holds a class that is not allowed.
    """
    try:
        with torch.serialization.safe_globals([*HARMLESS, *classes]):
            with contextlib.suppress(Exception):  # it would come again below
                return _load(data)  # few messages hold anything else, and a search for names takes as long as the load
            needed = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
            accepted = [name for name in needed if name in names or is_plain_class(loaded(name))]
            with torch.serialization.safe_globals(resolved(accepted)):
                return _load(data)
    except Exception as error:  # garbage can lead to any error
        if (refused := re.search(r"GLOBAL (\S+)", str(error))) is not None:
            name = refused[1]
            advice = advice_for(name)
        else:
            found = re.search(r"but got <class '([^']+)'", str(error))
            name = found[1] if found is not None else "what is not data"
            advice = "keep it as dicts, lists and tensors"
        if name in ("getattr", "builtins.getattr"):
            advice += ", or move its class, which is inside another one, to the top level of its module"
        raise RefusedError(name, advice) from error


def write(packed: Packed, file: BinaryIO) -> None:
    """Write the result of `pack`, one tensor after the other, so that little memory is needed besides the file."""
    file.write(len(packed.body).to_bytes(8, "little"))
    file.write(packed.body)
    for tensor in packed.tensors:
        file.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def read(file: BinaryIO, classes: Sequence[type] = (), names: Collection[str] = ()) -> Any:
    """Read the object that `write` has written; `classes` and `names` as in `loads`.

    Raises:
        TransferError: the file ends too early, or holds a class that is not allowed.
    """

    def fill(place: torch.Tensor) -> torch.Tensor:
        if not place.is_meta:
            return place
        tensor = torch.empty(place.shape, dtype=place.dtype)
        num_read = file.readinto(tensor.flatten().view(torch.uint8).numpy())  # type: ignore[attr-defined]
        if num_read != tensor.nbytes:
            raise TransferError(f"the file ends {tensor.nbytes - num_read} bytes too early")
        return tensor

    body = file.read(int.from_bytes(file.read(8), "little"))
    return _replaced(loads(body, classes, names), fill, {})


def names_in(packed: Packed) -> frozenset[str]:
    """Return the names of classes and functions in a message that are not accepted from every sender."""
    with torch.serialization.safe_globals(HARMLESS):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(packed.body))
    # A nested class is serialized as an attribute of its outer class. A sender that may look up attributes can reach anything.
    return frozenset(names) - {"builtins.getattr"}


def needed_names(obj: Any, classes: Sequence[type] = ()) -> frozenset[str]:
    """Return the names that a receiver needs to decode an object, see `names_in`. Shows that it can be sent and received.

    Raises:
        TransferError: it cannot be serialized, or a receiver would refuse it.
    """
    packed = pack(obj)
    names = names_in(packed)
    loads(packed.body, classes, names)
    return names


def resolved(names: Collection[str]) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return the objects of these names for `torch.serialization.safe_globals`; names not loaded here are skipped."""
    found = ((loaded(name), name) for name in names)
    return [(obj, name) for obj, name in found if obj is not None]


def _packed(obj: Any, inline_bytes: int | None = INLINE_BYTES) -> tuple[bytes, list[torch.Tensor]]:
    """Serialize the object without its large tensors; return both, the tensors in the order of `_replaced`."""
    large: list[torch.Tensor] = []

    def outline(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            raise TransferError("a tensor on the meta device has no values to send; materialise the model first")
        if tensor.layout != torch.strided or inline_bytes is None or tensor.nbytes <= inline_bytes:
            return tensor.detach().cpu().clone()  # without the clone, the whole memory that it is a view of would be written
        large.append(tensor.detach())
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    file = io.BytesIO()
    body = _replaced(obj, outline, {})
    try:
        torch.save(body, file)
    except Exception as error:  # pickle raises whatever an object's own methods raise
        raise TransferError(
            f"the state contains an object that cannot be serialized: {error}; "
            "keep it as tensors, numbers, strings, lists and dicts, or leave it out of state_dict and on_save_checkpoint"
        ) from error
    return file.getvalue(), large


def advice_for(name: str) -> str:
    return f"if it is harmless, allow it in the script: torch.serialization.add_safe_globals([{name.split('.')[-1]}])"


def _load(body: bytes) -> Any:
    return torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)


def loaded(name: str) -> Any:
    """Return the class or function of that name if its module is loaded. No module is imported for another worker."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:length]))
        if found is not None:
            for part in parts[length:]:
                found = getattr(found, part, None)
            return found
    return None


def is_plain_class(found: object) -> bool:
    """Whether creating an instance runs no code of the class itself: an enum, or a dataclass without `__post_init__`."""
    if not isinstance(found, type) or found.__module__.partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
        return False
    if issubclass(found, enum.Enum):
        return found._missing_.__func__ is enum.Enum._missing_.__func__  # type: ignore[attr-defined]
    init = found.__init__ if is_dataclass(found) else None
    is_generated = getattr(getattr(init, "__code__", None), "co_filename", "") == "<string>"
    hooks = ("__post_init__", "__setstate__", "__del__", "__new__")
    return is_generated and all(getattr(found, hook, None) is getattr(object, hook, None) for hook in hooks)


def _replaced(part: Any, replace: Callable[[torch.Tensor], torch.Tensor], known: dict[int, torch.Tensor]) -> Any:
    """Copy nested dicts, lists and tuples with their tensors replaced. A tensor that occurs twice stays one tensor."""
    if isinstance(part, torch.Tensor):
        if id(part) not in known:
            known[id(part)] = replace(part)
        return known[id(part)]
    if isinstance(part, dict):
        clone = copy.copy(part)  # keeps the version metadata of a module's state dict
        for key, value in part.items():
            clone[key] = _replaced(value, replace, known)
        return clone
    if type(part) in (list, tuple):
        return type(part)(_replaced(value, replace, known) for value in part)
    return part


log = logging.getLogger(__name__)

MAX_COPIED_BYTES = 64 << 20
"""Size of the largest buffer that is copied before each step, such as a queue of 65,536 keys of 256 floats."""


class BufferCopies:
    """Copies of a module's buffers, such as BatchNorm's means, from before a computation that a loss may interrupt.

    The forward pass writes buffers: a repeated one would count its batch twice, and results of an aborted collective would
    stay. The copies keep their memory from step to step. Larger buffers than `MAX_COPIED_BYTES` are skipped, with one warning.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(name, part) for name, part in module.named_modules()]
        self._kept: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []  # each buffer's holder, name and tensor
        self._copies: list[Tensor] = []
        self._left_out: set[str] = set()

    def keep(self) -> None:
        """Copy the buffers, in place of the former copies."""
        self._kept = [
            (part._buffers, name, buffer)
            for path, part in self._parts
            for name, buffer in part._buffers.items()
            if buffer is None or self._is_copied(f"{path}.{name}".lstrip("."), buffer)
        ]
        buffers = self._tensors()
        if [_layout(copy) for copy in self._copies] != [_layout(buffer) for buffer in buffers]:
            self._copies = [torch.empty_like(buffer) for buffer in buffers]
        _copy(self._copies, buffers)

    def restore(self) -> None:
        """Set the buffers to their copies. Can be called several times."""
        for buffers, name, buffer in self._kept:
            buffers[name] = buffer  # the computation may have assigned another tensor
        _copy(self._tensors(), self._copies)

    def _tensors(self) -> list[Tensor]:
        return [buffer for _, _, buffer in self._kept if buffer is not None and not is_expanded(buffer)]

    def _is_copied(self, name: str, buffer: Tensor) -> bool:
        if buffer.nbytes <= MAX_COPIED_BYTES:
            return True
        if name not in self._left_out:
            self._left_out.add(name)
            log.warning(
                "Buffer %s has %.0f MiB, too many to copy before each step: if a worker is lost in a step, what the forward "
                "pass has written to it stays, and the repeated step writes again",
                *(name, buffer.nbytes / 2**20),
            )
        return False


def is_expanded(buffer: Tensor) -> bool:
    """Whether several elements share memory. Nothing can be written to such a tensor."""
    strides = buffer.stride()
    return 0 in strides and any(size > 1 and step == 0 for size, step in zip(buffer.shape, strides, strict=True))


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if not to:
        return  # torch refuses empty lists
    with torch.no_grad():
        torch._foreach_copy_(to, values)  # few kernels for all buffers on a GPU


ROOT = Path("/dev/shm")
PREFIX = "dlrover-agent-"


class HostStateError(RuntimeError):
    """A state cannot be written to this host's memory, or read from it."""


class HostStateCache:
    """The job's state in this host's memory, left by a former group of workers of this worker's agent, if any.

    An agent of several workers ends all of them when one fails. If no worker of another node continues, the leaving workers
    write the state into the agent's folder in shared memory. The agent's next group of workers reads it. A state is complete or
    absent, and replaces the one before. The folder is removed when the agent ends, or, if it was killed, by the next agent.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "state"

    def write(self, step: int, packed: Packed) -> int:
        """Replace the kept state; return the bytes written.

        Raises:
            HostStateError: not enough room; the former state stays.
        """
        self._remove_unfinished()
        unfinished = self._file.with_suffix(f".{os.getpid()}")
        try:
            with unfinished.open("wb") as file:
                file.write(json.dumps({"step": step}).encode() + b"\n")
                write(packed, file)
                num_bytes = file.tell()
            unfinished.rename(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise HostStateError(
                f"the state of step {step} could not be kept in {self._file.parent}: {error}. Give the host, or its container, "
                "more shared memory (docker run --shm-size), or start one agent per worker"
            ) from error
        return num_bytes

    def remove(self) -> None:
        """Remove the state, for example if no worker can continue from it."""
        with contextlib.suppress(OSError):
            self._file.unlink()

    def _remove_unfinished(self) -> None:
        """Free the memory of unfinished states left by workers that were killed while writing."""
        for unfinished in self._file.parent.glob(f"{self._file.name}.*"):
            writer = unfinished.suffix.removeprefix(".")
            if not Path("/proc", writer).exists():
                with contextlib.suppress(OSError):
                    unfinished.unlink()

    def step(self) -> int | None:
        """Return the optimizer steps made before the state was written; None: no state exists."""
        try:
            with self._file.open("rb") as file:
                return int(json.loads(file.readline(1000))["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def read(self, classes: Sequence[type] = (), names: Collection[str] = ()) -> Any:
        """Return the kept object.

        Args:
            classes: classes accepted in addition to plain data.
            names: classes and functions accepted by name, see `transfer.names_in`.

        Raises:
            HostStateError: the state cannot be read.
        """
        try:
            with self._file.open("rb") as file:
                file.readline(1000)
                return read(file, classes, names)
        except (OSError, TransferError) as error:
            raise HostStateError(f"the state in {self._file} cannot be read: {error}") from error


def newest(steps: Sequence[int | None]) -> tuple[int, int]:
    """Return the largest step of the states on the members' hosts, and its rank; -1 if none has a state."""
    step = max((step for step in steps if step is not None), default=-1)
    return step, steps.index(step) if step >= 0 else 0


def resume(
    left: HostStateCache | None,
    source: int,
    rank: int,
    receivers: Collection[int],
    load: Callable[[Any], None],
    gather: Callable[[bool], list[bool]],
    is_failure: Callable[[BaseException], bool],
    classes: Sequence[type] = (),
    names: Collection[str] = (),
) -> bool:
    """Load one member's state into the receivers. All members of a round call it.

    If a receiver cannot load the state, all members remove theirs: the next group of workers would end like this one.

    Args:
        source: rank on the host that has the state.
        receivers: ranks that call `load` with the state.
        gather: returns the values of all members, by rank.
        is_failure: whether an error means that the round is broken, so that the state may still be whole.
        classes, names: see `HostStateCache.read`.

    Returns:
        Whether the source could read the state.
    """
    state: Any = None
    if left is not None and rank == source:
        try:
            state = left.read(classes, names)
        except HostStateError as error:
            log.warning("%s", error)
    if not any(gather(state is not None)):
        return False
    for receiver in (each for each in receivers if each != source):
        if rank == source:
            send(state, receiver)
        elif rank == receiver:
            state = receive(source, classes, names)
    problem: Exception | None = None
    if rank in receivers:
        try:
            load(state)
        except Exception as error:  # a state of another model, for example, may raise anything
            if is_failure(error):
                raise
            problem = error
    if not all(gather(problem is None)) and left is not None:
        left.remove()
    if problem is not None:
        raise problem
    return True
