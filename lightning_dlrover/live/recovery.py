"""Run collectives so that they survive the loss of a worker.

Inside a training step a collective that fails is repeated with the step. Outside of steps it is repeated by itself, or its
result is taken from a survivor. Collectives are counted for that: a number stands for the same collective on all workers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from lightning_dlrover.live.position import FitPosition, Position
from lightning_dlrover.live.unused_parameters import IncompleteBackwardError
from lightning_dlrover.rdzv.group import transfer
from lightning_dlrover.rdzv.group.purpose import Purpose, place_of
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.live.member import Formation

__all__ = ["ResilientCollectives"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class Survivors(Protocol):
    """The workers that are left after a loss, as this worker meets them."""

    def meet_survivors(self) -> bool:
        """Form the next round with them. Return whether the current step's update was taken over from one of them."""


class HasDevice(Protocol):
    """What knows the device on which this worker trains, which may be set late."""

    @property
    def device(self) -> torch.device: ...


class ResilientCollectives:
    """One worker's round, see `ports.Round`: its collectives, and the results that other workers may lack after a loss.

    Args:
        trainer: has the device on which this worker trains.
        survivors: forms the next round after a loss.
    """

    def __init__(self, world: World, position: FitPosition, trainer: HasDevice, survivors: Survivors) -> None:
        self._world = world
        self._position = position
        self._trainer = trainer
        self._survivors = survivors
        self._results: dict[tuple[int, int], Any] = {}
        self._missed: dict[tuple[int, int], Any] = {}

    # --- the round ----------------------------------------------------------------------------------------------------------

    @property
    def formation(self) -> Formation | None:
        return self._position.formation

    @property
    def rank(self) -> int:
        return self._position.rank

    @property
    def size(self) -> int:
        return self._position.size

    @property
    def broken(self) -> bool:
        return self._world.broken

    @property
    def is_asynchronous(self) -> bool:
        return self._world.is_asynchronous

    @property
    def num_begun(self) -> int:
        return self._world.num_begun

    @property
    def wishes(self) -> list[int]:
        return self._world.wishes

    @wishes.setter
    def wishes(self, wishes: list[int]) -> None:
        self._world.wishes = wishes

    def is_failure(self, error: BaseException) -> bool:
        return self._world.is_failure(error)

    def alone(self, reason: str) -> AbstractContextManager[None]:
        return self._world.alone(reason)

    def compared(self, purpose: Callable[[], Purpose]) -> AbstractContextManager[None]:
        return self._world.compared(purpose)

    def all_reach(self, place: str, timeout_s: float | None = None) -> bool:
        return self._world.all_reach(place, timeout_s)

    def recover(self) -> bool:
        """Form the next round with the survivors. Return whether this step's update was taken over from another worker."""
        return self._survivors.meet_survivors()

    # --- outside of steps ------------------------------------------------------------------------------------------------

    def run(self, run: Callable[[], T], is_joint: bool = True) -> T:
        """Run a collective of the strategy. If it fails, repeat it with the survivors or take its result from one of them.

        Args:
            is_joint: whether it ends nowhere before all workers have entered it. Then all have the results of earlier ones.
        """
        position = self._position
        if not position.has_entered or position.is_computing:
            return run()
        position.collective += 1
        key = (position.batch, position.collective)
        while True:
            if key in self._missed:
                result: T = self._missed.pop(key)
                break
            if (done := self.attempt(self._checked, run)) is not None:
                result = done[0]
                break
            self.recover()
        if is_joint:
            self._results = {}
        self._results[key] = result
        return result

    def exchange(self, what: str, run: Callable[[], T]) -> T:
        """Run a collective of our own under a name, which the error shows if other workers meanwhile run another one."""
        return self.run(lambda: self.named(what, run))

    def named(self, what: str, run: Callable[[], T]) -> T:
        """Run collectives under one name, which all workers must share."""
        frame = sys._getframe(1)
        with self._world.compared(lambda: Purpose(what, place=place_of(frame), any_place=True)):
            return run()

    def once(self, run: Callable[[], T]) -> tuple[T] | None:
        """Run a collective that must not be repeated before a loss is handled.

        Returns:
            Its result, or that of another survivor; None if no worker has it, after the survivors have met again.
        """
        position = self._position
        position.collective += 1
        key = (position.batch, position.collective)
        result = self.attempt(self._checked, run)
        if result is None:
            self.recover()
            if key not in self._missed:
                position.collective -= 1  # the other workers count the next attempt as the same collective
                return None
            result = (self._missed.pop(key),)
        self._results = {key: result[0]}
        return result

    def gathered(self, mine: Any) -> list[Any]:
        """Return all workers' values by rank. A failure is the caller's to handle."""
        return transfer.all_gather(mine) if self._position.size > 1 else [mine]

    def gathered_from(self, ranks: Sequence[int], mine: Any) -> dict[int, Any]:
        """Return the values of some workers by rank; all name the same ones. A failure is the caller's to handle."""
        return transfer.gather_from(ranks, mine) if self._position.size > 1 else dict.fromkeys(ranks, mine)

    def largest(self, mine: Sequence[int]) -> list[int]:
        """Return, for each place, the largest number of all workers. A failure is the caller's to handle."""
        return transfer.largest(mine) if self._position.size > 1 else [*mine]

    def attempt(self, run: Callable[..., T], *args: Any) -> tuple[T] | None:
        """Return the result of a function with collectives; None if one failed, after which the caller has to `recover`."""
        # The caller recovers outside of the `except` block, because a live traceback would keep the old group alive.
        try:
            return (run(*args),)
        except Exception as error:
            if not self._is_failure(error):
                raise
            log.info("worker %s: a collective failed: %s", self._world.worker_id, str(error).splitlines()[0][:200])
        return None

    def renew_if_broken(self) -> None:
        """Form the next round if this one has ended. Call it where no unfinished work would have to be repeated."""
        if self._world.broken:
            self.recover()

    def _is_failure(self, error: BaseException) -> bool:
        if not self._position.has_entered and self._position.formation is None:
            return False
        if isinstance(error, IncompleteBackwardError):
            return True
        if not self._position.has_entered:
            return self._world.is_failure(error)
        return self._world.is_recoverable(error, self._position.is_computing)

    # --- results of an ended round ----------------------------------------------------------------------------------------

    def check_gradients(self) -> None:
        """Raise if gradients may come from an aborted reduction: these must not reach the weights."""
        if self._position.size > 1 and self._position.has_entered:
            self.wait_for_results()
            if self._world.broken:
                raise self._world.broken_error()

    def wait_for_results(self) -> None:
        """Wait until the results of all collectives are there, if their backend does not wait for them itself."""
        if self._world.is_asynchronous:
            self._world.wait_for_device(self._trainer.device)

    def check_group(self) -> None:
        """Raise if an abort has removed the group: Lightning's collectives would silently do nothing."""
        if self._position.size > 1 and not dist.is_initialized():
            raise self._world.broken_error()

    def _checked(self, run: Callable[[], T]) -> T:
        """Return the result of a collective outside of steps, unless an abort has ended it early."""
        result = run()
        if self._world.is_asynchronous and self._position.size > 1:
            self._world.wait_for_device(self._trainer.device)
            if self._world.broken:
                raise self._world.broken_error()
        return result

    # --- results that others lack -------------------------------------------------------------------------------------------

    @property
    def has_missed_result(self) -> bool:
        """Whether another worker has brought the result of this worker's current collective."""
        return (self._position.batch, self._position.collective) in self._missed

    def begin_batch(self, batch: int) -> None:
        """Count collectives anew. The next batch is about to be handed out."""
        self._position.batch = batch
        self._position.collective = 0
        self._results = {key: value for key, value in self._results.items() if key[0] >= batch - 1}

    def forget(self) -> None:
        """Drop all results, because all workers go back to a snapshot."""
        self._position.collective = 0
        self._results, self._missed = {}, {}

    def share_results(self, formation: Formation, standing: Mapping[str, Position]) -> None:
        """Send results of collectives outside of steps to the workers that lack them."""
        places = {w: (p.batch, p.collective) for w, p in standing.items()}
        furthest = max(places.values())
        if all(place == furthest for place in places.values()):
            return
        source = next(w for w in formation.round.members if places.get(w) == furthest)
        if self._world.worker_id == source:
            for worker in formation.round.members:
                if worker != source:
                    transfer.send(self._results, formation.rank_of(worker))
        else:
            results = transfer.receive(formation.rank_of(source))
            self._missed.update({key: value for key, value in results.items() if key not in self._results})
