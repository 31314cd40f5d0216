"""The world of a script that was started by hand, with one worker, no etcd, and the same methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.rdzv.group.left_state import HostStateCache
from lightning_dlrover.rdzv.group.loop import Stateful, Step, steps
from lightning_dlrover.rdzv.group.meeting import OutsideOfLoops, PlaceInProgram
from lightning_dlrover.rdzv.group.purpose import Purpose
from lightning_dlrover.rdzv.group.torch_names import HashStore
from lightning_dlrover.rdzv.group.transfer import Packed
from lightning_dlrover.rdzv.job.events import Event
from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.live.member import Formation, WorldError

__all__ = ["LoneWorld"]


class LoneWorld:
    """A `World` of a single worker, which no other worker can join.

    It has all methods of `World`. Those that need other workers or the job's records raise a `WorldError`.
    """

    def __init__(self) -> None:
        self.backend = "gloo"
        self.is_asynchronous = False
        self.num_fits = 0
        self.place: PlaceInProgram = OutsideOfLoops()  # place of the training loop that runs
        self.wishes: list[int] = []
        self._formation: Formation | None = None
        self._has_finished = False

    def __enter__(self) -> LoneWorld:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.leave()

    def steps(self, num_steps: int, *, first_step: int = 0, check_interval_s: float = 0.1, **state: Stateful) -> Iterator[Step]:
        """See `World.steps`."""
        yield from steps(self, num_steps, first_step, state, check_interval_s)

    # --- entering and leaving ----------------------------------------------------------------------------------------

    @property
    def worker_id(self) -> str:
        return "alone"

    @property
    def formation(self) -> Formation | None:
        return self._formation

    @property
    def left_state(self) -> HostStateCache | None:
        return None

    @property
    def owned_sockets(self) -> list[tuple[int, int]]:
        return []

    @property
    def num_begun(self) -> int:
        return 0

    def start(self) -> Formation:
        """Form a group of one worker, in which the user's collectives work as usual."""
        round_ = RoundRecord(1, [self.worker_id], "start with 1 worker", "start", planned=True)
        dist.init_process_group(self.backend, store=HashStore(), rank=0, world_size=1)
        self._formation = Formation(round_, {self.worker_id: b""}, 0)
        return self._formation

    def guard(self, replica: DistributedDataParallel) -> None:
        pass  # there is no peer to lose

    def wait_for_device(self, device: torch.device) -> None:
        pass  # gradients need no reduction

    def listen_for_sigterm(self) -> None:
        pass  # there is no peer that would go on

    def resign(self) -> None:
        pass

    def leave(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    # --- the job -----------------------------------------------------------------------------------------------------

    def announce(self, fingerprint: str, global_batch_size: int = 0, data: str = "") -> None:
        pass

    @property
    def has_finished(self) -> bool:
        return self._has_finished

    def finish(self, num_steps: int, fit: int = 1) -> None:
        self._has_finished = True

    def is_stop(self, number: int) -> bool:
        return False

    def keep_for_successors(self, step: int, packed: Packed) -> None:
        pass

    def event(self, event: Event, text: str) -> None:
        pass

    def report_error(self, error: BaseException) -> None:
        pass

    # --- while the round lasts ---------------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        return False

    def broken_error(self) -> WorldError:
        return WorldError("the round has ended")

    def is_failure(self, error: BaseException) -> bool:
        return False

    def is_recoverable(self, error: BaseException, is_in_step: bool) -> bool:
        return False

    def compared(self, purpose: Callable[[], Purpose]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def alone(self, reason: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def all_reach(self, place: str, timeout_s: float | None = None) -> bool:
        return True

    def propose(self, check_every: int = 1, wishes: Sequence[int] = (), place: int = 0) -> None:
        self.wishes = list(wishes)  # without peers the minimum is the worker's own number

    @property
    def is_voting(self) -> bool:
        return False

    def agreed(self) -> tuple[int | None, int]:
        return None, 1

    # --- unavailable without others ----------------------------------------------------------------------------------

    @property
    def config(self) -> NoReturn:
        raise _refusal("a configuration")

    @property
    def membership(self) -> NoReturn:
        raise _refusal("records of a job")

    @property
    def view(self) -> NoReturn:
        raise _refusal("records of a job")

    @property
    def records(self) -> NoReturn:
        raise _refusal("records of a job")

    @property
    def standing(self) -> NoReturn:
        raise _refusal("a record of its job")

    def admit(self, hello: bytes, fingerprint: str) -> Formation:
        raise _refusal("a job to be admitted to")

    def switch(self, number: int, hello: bytes) -> Formation:
        raise _refusal(f"a round {number} to switch to")

    def recover(self, hello: bytes) -> Formation:
        raise _refusal("other workers to recover with")

    def connect(self, target: RoundRecord, name: str, workers: Sequence[str]) -> dist.ProcessGroupGloo:
        raise _refusal("other workers to connect to")


def _refusal(what: str) -> WorldError:
    return WorldError(
        f"this worker was started by hand, so it has not got {what}: "
        "start the script with torchrun --rdzv-backend=etcd-v3, or with dlrover run"
    )
