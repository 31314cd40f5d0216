"""A backend for tests without a GPU that behaves as NCCL does where NCCL differs from gloo.

`install` registers it as "stand_in" for tensors on the CPU, and makes `torch.cpu.synchronize` wait for its results, as
`torch.cuda.synchronize` waits for NCCL's. Torch has that function for code that suits any device, so a product that waits for
its device needs no branch for tests.

Values travel between the members through sockets on the loopback, one for each pair. Gloo could not carry them: it has no
abort, and its threads outlive a broken group.

The source of each rule is named where it is followed. `ProcessGroupNCCL` is torch's `ProcessGroupNCCL.cpp`. "Seen on an H100"
means a job of two workers on one GPU, one of them killed (torch 2.11, NCCL 2.28.9).
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import queue
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_dlrover.rdzv.transport import process_groups
from lightning_dlrover.rdzv.transport.torch_names import Store

NAME = "stand_in"

MIN_POLL_S, MAX_POLL_S = 0.003, 0.1
"""Seconds between two looks for members that a communicator lacks, at first and in the end."""

WATCHDOG_S = 0.1
"""Seconds between a communicator's error and the end of the process, as between two looks of NCCL's watchdog."""

REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda values: values.sum(0, dtype=values.dtype),
    dist.ReduceOp.AVG: lambda values: values.sum(0, dtype=values.dtype) / len(values),
    dist.ReduceOp.PRODUCT: lambda values: values.prod(0, dtype=values.dtype),
    dist.ReduceOp.MIN: lambda values: values.amin(0),
    dist.ReduceOp.MAX: lambda values: values.amax(0),
}

Payload: TypeAlias = list[bytes]  # values of some tensors
Found: TypeAlias = dict[int, Payload]  # keyed by the sender's rank
Writes: TypeAlias = list[tuple[Tensor, Tensor]]  # tensors, and their values


@dataclass(frozen=True)
class Quirks:
    """Behaviour that may differ from one run of NCCL to the next."""

    create_s: float = 0.0  # seconds to create a communicator, once all members are there
    loss: Literal["error", "hang", "either"] = "error"  # how a lost peer shows; "either": drawn for each communicator
    notice_s: float = 0.02  # seconds until it shows
    abort_s: float = 0.0  # seconds of an abort; collectives in flight end after half of them
    is_late: bool = False  # whether futures complete before the result is there, see `Result.get_future`
    cramped_rank: int = -1  # rank whose device has room for one communicator only
    is_one_at_a_time: bool = False  # whether the device runs one collective at a time, of all groups together
    seed: int = 0


_quirks = Quirks()


def install(quirks: Quirks) -> None:
    """Register the backend in this process, and make `torch.cpu.synchronize` wait for its results."""
    global _quirks
    _quirks = quirks
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, StandIn, devices=["cpu"])
        process_groups.register(NAME, process_groups.Traits(is_asynchronous=True, is_abortable=True))
    torch.cpu.synchronize = synchronize


# --- the device ---------------------------------------------------------------------------------------------------------------


class Stream:
    """Runs collectives in the order of their begin."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, run: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stand-in-stream", daemon=True)
            self._thread.start()
        self._queue.put(run)

    def _run(self) -> None:
        while True:
            self._queue.get()()


_device = Stream()
"""Stream of all groups on a device without room for two kernels.

NCCL's user guide, "Using multiple NCCL communicators concurrently": collectives of two communicators deadlock if members begin
them in different orders, and a device cannot run both at once.
"""

_in_flight: set[Result] = set()
"""Results that have not been waited for."""


def synchronize(device: object = None) -> None:
    """Wait until all collectives have ended, as `cudaStreamSynchronize` does: an abort ends the wait without an error."""
    for result in sorted(_in_flight.copy(), key=lambda each: each.number):
        result.finish()


class Result(dist.Work):
    """A collective, as the caller sees it."""

    _counter = 0

    def __init__(self, communicator: Communicator, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        Result._counter += 1
        self.number = Result._counter
        self._communicator = communicator
        self._outputs = outputs
        self._future: Future[Any] = Future()
        self._has_ended = threading.Event()
        self._lock = threading.Lock()
        self._writes: Writes | None = None
        self._is_late = _quirks.is_late
        _in_flight.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the result, or for garbage if the communicator is aborted; raise nothing but errors known before.

        `ProcessGroupNCCL::WorkNCCL::wait` makes the current stream wait, and only then throws an exception that was detected
        before. With a timeout it makes the host wait, and aborts the communicator when the time is up. On a CPU the program's
        next line needs the result, as the stream's next kernel does on a GPU. So this blocks.
        """
        self._communicator.raise_error(aborts=True)
        if timeout > timedelta(0) and not self._has_ended.wait(timeout.total_seconds()):
            self._communicator.abort()
            raise dist.DistBackendError(f"Watchdog caught collective operation timeout: ran for {timeout} before timing out.")
        self.finish()
        return True

    def get_future(self) -> Future[Any]:
        """Return a future of the outputs.

        In late mode it has completed already, and the outputs have not changed yet. `WorkNCCL::getFuture` completes when the
        kernel is queued; who uses the tensors next on the same stream is right nonetheless, and the host is not. DDP hands
        these tensors on as gradients, if they are views of its buckets. So in this mode a script must use
        `gradient_as_bucket_view=True` and leave gradients alone until the optimizer's step.
        """
        if self._is_late and not self._future.done():
            self._future.set_result(list(self._outputs))
        return self._future

    def is_completed(self) -> bool:
        return self._has_ended.is_set()

    def is_success(self) -> bool:
        return self.is_completed()

    def finish(self) -> None:
        self._has_ended.wait()
        with self._lock:
            self._write()

    def ended(self, writes: Writes) -> None:
        """Note the values of the outputs. They are written here, or in late mode when they are waited for."""
        with self._lock:
            if self._has_ended.is_set():
                return
            self._writes = writes
            if not self._is_late:
                self._write()
            self._has_ended.set()
        if not self._is_late:
            self._future.set_result(list(self._outputs))

    def aborted(self) -> None:
        """End with garbage in the outputs: an aborted kernel returns, with the data received by then."""
        self.ended([(each, garbage_like(each)) for each in self._outputs])
        self.finish()

    def _write(self) -> None:
        writes, self._writes = self._writes, None
        for target, value in writes or ():
            target.detach().copy_(value)
        _in_flight.discard(self)


def connect_limit_s() -> float:
    """Return torch's limit for connecting in non-blocking mode (`nccl_nonblocking_timeout`)."""
    if os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING", "1") == "0":
        return math.inf
    return float(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1800"))


def garbage_like(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return torch.full_like(tensor, math.nan)
    return torch.ones_like(tensor) if tensor.dtype is torch.bool else torch.randint_like(tensor, 100)


# --- a communicator -----------------------------------------------------------------------------------------------------------


_alive: set[Communicator] = set()
_alive_lock = threading.Lock()


class Communicator:
    """Connections with all other members, through which values travel in the order of collectives."""

    def __init__(self, group: StandIn, number: int) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self._watches = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0"
        draw = random.Random(f"{_quirks.seed} {self.rank} {number} {os.getpid()}").choice(["error", "hang"])
        self._loss_shows = (draw if _quirks.loss == "either" else _quirks.loss) == "error"
        self._stream = _device if _quirks.is_one_at_a_time else Stream()
        self._error = ""
        self._is_aborted = False
        self._is_over = False
        self._changed = threading.Condition()
        self._mail: dict[tuple[int, Any], Payload] = {}
        self._unfinished: list[Result] = []
        self._num_messages: dict[tuple[str, int], int] = {}
        self._num_begun = 0
        self._sockets = self._connect(group.store, number) if self.size > 1 else {}
        self._take_memory()
        self._sending = {rank: threading.Lock() for rank in self._sockets}
        for rank, sock in self._sockets.items():
            threading.Thread(target=self._read, args=(rank, sock), name="stand-in-read", daemon=True).start()

    def _take_memory(self) -> None:
        """Raise if the driver has no memory left for the buffers, which NCCL needs once all members are there."""
        with _alive_lock:
            if _alive and self.rank == _quirks.cramped_rank:
                self._close()
                raise dist.DistBackendError(
                    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error, NCCL version "
                    "2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc 4 bytes"
                )
            _alive.add(self)

    def _connect(self, store: Store, number: int) -> dict[int, socket.socket]:
        """Connect with all members; wait for those that are missing, in non-blocking mode up to torch's limit.

        `ncclCommInitRank` has no timeout (nccl issue 289), and blocking mode gives no handle that could be aborted
        (pytorch issues 103264 and 103925). In non-blocking mode the first collective waits (`NCCLComm::getNcclComm`,
        `waitReady`) up to TORCH_NCCL_NONBLOCKING_TIMEOUT, and holds the lock that `NCCLComm::abort` needs. Before that, rank 0
        sends the communicator's id through the group's store, within the store's timeout
        (`ProcessGroupNCCL::broadcastUniqueNCCLID`).
        """
        with socket.create_server(("127.0.0.1", 0)) as listener:
            if self.rank == 0:
                store.set(f"{number}", "an id")
            try:
                store.get(f"{number}")
            except RuntimeError as error:
                raise dist.DistBackendError(
                    f"[{self.rank}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value "
                    f"store by key '{number}', but store->get('{number}') got error: {error}"
                ) from error
            with contextlib.suppress(RuntimeError):
                store.set(f"{number}/{self.rank}", str(listener.getsockname()[1]))
            found: dict[int, socket.socket] = {}
            pause_s = MIN_POLL_S
            began = time.monotonic()
            while len(found) < self.size - 1:
                if time.monotonic() - began > connect_limit_s():
                    raise dist.DistBackendError("NCCL timeout in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:204")
                listener.settimeout(pause_s)
                pause_s = min(1.2 * pause_s, MAX_POLL_S)
                with contextlib.suppress(TimeoutError):
                    sock, _ = listener.accept()
                    sock.settimeout(None)
                    found[struct.unpack("i", sock.recv(4, socket.MSG_WAITALL))[0]] = sock
                with contextlib.suppress(OSError, RuntimeError):  # a member or the store is gone: NCCL would wait on
                    for rank in range(self.rank):
                        if rank not in found and store.check([f"{number}/{rank}"]):
                            sock = socket.create_connection(("127.0.0.1", int(store.get(f"{number}/{rank}"))))
                            sock.sendall(struct.pack("i", self.rank))
                            found[rank] = sock
            time.sleep(_quirks.create_s)
            return found

    # --- collectives --------------------------------------------------------------------------------------------------

    def begin(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        sources: Sequence[int],
        outputs: Sequence[Tensor],
        values: Callable[[Found], list[Tensor]],
        message: str = "",
    ) -> Result:
        """Begin to send tensors to other ranks, and to compute the values of `outputs` from the data of `sources`.

        Raises:
            DistBackendError: a peer's loss has shown, or the communicator was aborted.
        """
        self.raise_error()
        result = Result(self, outputs)
        payloads: dict[int, Payload] = {}  # their present values: the kernel waits for earlier work of the current stream
        for tensors in {id(each): each for each in sends.values()}.values():
            payload = [_bytes_of(tensor) for tensor in tensors]
            payloads.update({rank: payload for rank, each in sends.items() if each is tensors})
        key: Any = self._num_begun
        if message:
            [peer] = {*sends, *sources}
            key = "message", self._num_messages.get((message, peer), 0)
            self._num_messages[message, peer] = key[1] + 1
        else:
            self._num_begun += 1
        with self._changed:
            self._unfinished = [each for each in self._unfinished if not each.is_completed()] + [result]

        def run() -> None:
            found = self._exchange(key, payloads, sources)
            if found is None:
                result.aborted()
            else:
                result.ended(list(zip(outputs, values(found), strict=True)))

        if self.size == 1:
            run()
        elif message == "send":
            threading.Thread(target=run, daemon=True).start()  # a kernel that sends needs no kernel that follows it
        else:
            self._stream.add(run)
        return result

    def _exchange(self, key: Any, payloads: Mapping[int, Payload], sources: Sequence[int]) -> Found | None:
        for rank, payload in payloads.items():
            self._send(rank, key, payload)
        with self._changed:
            self._changed.wait_for(lambda: self._is_aborted or all((rank, key) in self._mail for rank in sources))
            return None if self._is_aborted else {rank: self._mail.pop((rank, key)) for rank in sources}

    def _send(self, rank: int, key: Any, payload: Payload) -> None:
        if rank == self.rank:
            with self._changed:
                self._mail[rank, key] = payload
            return
        message = pickle.dumps((key, payload))
        with contextlib.suppress(OSError), self._sending[rank]:  # the reader notices a lost peer
            self._sockets[rank].sendall(struct.pack("q", len(message)) + message)

    def _read(self, rank: int, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock.makefile("rb") as file:
            while len(header := file.read(8)) == 8:
                message = file.read(struct.unpack("q", header)[0])
                if len(message) < struct.unpack("q", header)[0]:
                    break
                key, payload = pickle.loads(message)
                with self._changed:
                    self._mail[rank, key] = payload
                    self._changed.notify_all()
        with self._changed:
            has_ended = self._is_over or self._is_aborted or (rank, "bye") in self._mail
        if not has_ended:
            self._peer_is_lost(rank)

    # --- losses -------------------------------------------------------------------------------------------------------

    def _peer_is_lost(self, rank: int) -> None:
        """Show the loss, or leave it to an abort.

        The survivor gets `DistBackendError` with this text (seen on an H100). Nothing shows on a member that has no connection
        to the lost one, or if a network was cut (pytorch issue 103264): collectives in flight wait.
        """
        time.sleep(_quirks.notice_s)
        with self._changed:
            if self._is_aborted or self._is_over or not self._loss_shows:
                return
            self._error = (
                "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or there was a "
                "network error, NCCL version 2.28.9\nncclRemoteError: A call failed possibly due to a network error or a "
                "remote process exiting prematurely.\nLast error:\n"
                f"socketProgress: Connection closed by remote peer rank {rank}"
            )
            self._changed.notify_all()
        if self._watches:
            self._watchdog()

    def _watchdog(self) -> None:
        """End the process, unless the communicator is aborted at once.

        `ProcessGroupNCCL::Watchdog::runLoop` looks for errors each 100 ms, and rethrows one unless
        TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 (`WorkNCCL::handleException`). Nothing catches it, so the process ends with
        SIGABRT. Torch's elastic agent sets 1 in each worker's environment (`LocalElasticAgent._start_workers`).
        """
        time.sleep(WATCHDOG_S)
        if not self._is_aborted:
            print("To avoid data inconsistency, we are taking the entire process down.", file=sys.stderr, flush=True)
            os.abort()

    def raise_error(self, aborts: bool = False) -> None:
        """Raise the errors of NCCL's calls (`NCCLComm::checkForNcclError` and `getNcclComm`)."""
        if self._is_aborted:
            if not aborts:
                raise _aborted(self.rank)
        elif self._error:
            if aborts:
                self._end()
            raise dist.DistBackendError(self._error)

    def abort(self) -> None:
        """End all collectives in flight with garbage (`ncclCommAbort`)."""
        with self._changed:
            if self._is_over:
                return
        self._end()

    def _end(self) -> None:
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()
            unfinished, self._unfinished = self._unfinished, []
        for result in unfinished:
            result.aborted()
        self._close()

    def finalize(self) -> None:
        """Wait until all members have called this.

        `ncclCommFinalize` is a collective call and flushes all operations (NCCL's user guide, "Finalizing a communicator").
        With a lost peer it returns the error once more (seen on an H100).
        """
        if self._is_aborted:
            return
        self.raise_error()
        for result in list(self._unfinished):
            result.finish()
        for rank in self._sockets:
            self._send(rank, "bye", [])
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_aborted or self._error or all((rank, "bye") in self._mail for rank in self._sockets)
            )
            if not self._is_aborted and not all((rank, "bye") in self._mail for rank in self._sockets):
                raise dist.DistBackendError(self._error)
            self._is_over = True
        self._close()

    def _close(self) -> None:
        _alive.discard(self)
        for sock in self._sockets.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def _aborted(rank: int) -> dist.DistBackendError:
    return dist.DistBackendError(f"NCCL communicator was aborted on rank {rank}.")


def _bytes_of(tensor: Tensor) -> bytes:
    found: bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


def _like(payload: bytes, tensor: Tensor) -> Tensor:
    """Return received values in the shape and type of `tensor`."""
    if not payload:
        return torch.empty_like(tensor)
    return torch.frombuffer(bytearray(payload), dtype=tensor.dtype).view(tensor.shape)


# --- the group ----------------------------------------------------------------------------------------------------------------


_ProcessGroup: Any = dist.ProcessGroup  # its overloads with single tensors are for Python only


class StandIn(_ProcessGroup):  # type: ignore[misc]
    """A process group; torch creates it as it creates any registered backend, and C++ calls these methods."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.store = store
        self.is_aborted = False
        self.supports_splitting = True
        self._rank, self._size, self._timeout = rank, size, timeout
        self._name = ""
        self._num_begun = 0
        self._current: Communicator | None = None
        self._creating = threading.Lock()

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> Any:
        return self._name

    def _set_group_name(self, name: Any) -> None:
        self._name = name

    def _get_backend(self, device: torch.device) -> Any:
        if device.type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._num_begun

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Create the communicator now and not in the first collective (`ProcessGroupNCCL::eagerConnectSingleDevice`)."""
        self._communicator()

    def _communicator(self) -> Communicator:
        """Return the communicator. Its first use creates it (`ProcessGroupNCCL::getNCCLComm`), and blocks the caller."""
        if self.is_aborted:
            raise _aborted(self._rank)
        if self._current is None:
            with self._creating:
                self._current = self._current or Communicator(self, 0)
        return self._current

    def abort(self) -> None:
        """Abort the communicator. Wait as long as that takes, but no longer than the group's timeout.

        `ProcessGroupNCCL::abort` waits so for `ncclCommAbort`, which may hang (nccl issues 1777, 1013 and 863).
        """
        self.is_aborted = True
        if _quirks.abort_s > 2 * self._timeout.total_seconds():
            time.sleep(self._timeout.total_seconds())
            raise dist.DistBackendError(f"[Rank {self._rank}] ProcessGroup abort timed out.")
        time.sleep(_quirks.abort_s / 2)
        with self._creating if connect_limit_s() < math.inf else contextlib.nullcontext():  # see `Communicator._connect`
            if self._current is not None:
                self._current.abort()
        time.sleep(_quirks.abort_s / 2)

    def shutdown(self) -> None:
        """Finalize the communicator, unless it was aborted (`ProcessGroupNCCL::shutdown`)."""
        if self._current is not None:
            self._current.finalize()

    # --- collectives --------------------------------------------------------------------------------------------------

    def _begin(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        sources: Sequence[int],
        outputs: Sequence[Tensor],
        values: Callable[[Found], list[Tensor]],
        message: str = "",
    ) -> Any:
        communicator = self._communicator()
        self._num_begun += 1
        return communicator.begin(sends, sources, outputs, values, message)

    @property
    def _all(self) -> range:
        return range(self._size)

    def _reduce(self, sends: Mapping[int, Sequence[Tensor]], outputs: Sequence[Tensor], opts: Any) -> Any:
        """Reduce the tensors that all ranks send to this one."""
        reduction = next(reduction for op, reduction in REDUCTIONS.items() if opts.reduceOp == op)

        def values(found: Found) -> list[Tensor]:
            return [reduction(torch.stack([_like(found[rank][i], out) for rank in self._all])) for i, out in enumerate(outputs)]

        return self._begin(sends, self._all if outputs else (), outputs, values)

    def _move(self, sends: Mapping[int, Sequence[Tensor]], outputs: Mapping[int, Sequence[Tensor]], message: str = "") -> Any:
        """Write the data from each rank into the tensor for that rank."""

        def values(found: Found) -> list[Tensor]:
            return [_like(found[rank][i], out) for rank, outs in outputs.items() for i, out in enumerate(outs)]

        return self._begin(sends, list(outputs), [out for outs in outputs.values() for out in outs], values, message)

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = dist.AllreduceOptions() if opts is None else opts
        return self._reduce(dict.fromkeys(self._all, tensors), tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> Any:
        return self._reduce({opts.rootRank: tensors}, tensors if self._rank == opts.rootRank else (), opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        if self._rank == opts.rootRank:
            return self._move({rank: tensors for rank in self._all if rank != self._rank}, {})
        return self._move({}, {opts.rootRank: tensors})

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._move(dict.fromkeys(self._all, inputs), {rank: [outs[rank] for outs in outputs] for rank in self._all})

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self.allgather([output.view(-1).chunk(self._size)], [input])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.allgather([output.view(-1).chunk(self._size) for output in outputs], inputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._move(dict.fromkeys(self._all, inputs), {rank: outputs[rank] for rank in self._all})

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        is_root = self._rank == opts.rootRank
        return self._move({opts.rootRank: inputs}, {rank: [outputs[0][rank]] for rank in self._all} if is_root else {})

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        is_root = self._rank == opts.rootRank
        return self._move({rank: [inputs[0][rank]] for rank in self._all} if is_root else {}, {opts.rootRank: outputs})

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._reduce({rank: [each[rank] for each in inputs] for rank in self._all}, outputs, opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> Any:
        return self.reduce_scatter([output], [input.view(-1).chunk(self._size)], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self.reduce_scatter(outputs, [each.view(-1).chunk(self._size) for each in inputs], opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._move({rank: [inputs[rank]] for rank in self._all}, {rank: [outputs[rank]] for rank in self._all})

    def all_to_all_single(self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None) -> Any:
        def parts(tensor: Any, splits: Sequence[int]) -> Any:
            return tensor.split(list(splits)) if splits else tensor.chunk(self._size)

        return self.alltoall(parts(output, output_splits), parts(input, input_splits))

    def barrier(self, opts: Any = None) -> Any:
        return self.allreduce([torch.zeros(1)])

    def send(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        return self._move({rank: tensors}, {}, "send")

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        return self._move({}, {rank: tensors}, "receive")
