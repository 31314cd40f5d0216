"""The strategy's collectives outside of training steps: which workers meet, and what they compare before they do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlrover.live.lightning_names import logged_name
from lightning_dlrover.rdzv.group import transfer
from lightning_dlrover.rdzv.group.purpose import Purpose, place_of

if TYPE_CHECKING:
    from lightning_dlrover.live.place_in_job import JobSession

__all__ = ["Collectives"]

T = TypeVar("T")


class Collectives:
    """Run Lightning's own collectives, repeated after a loss.

    Args:
        job: None where the world cannot change. There collectives run as they are.

    Attributes:
        are_off: whether collectives do nothing; see `alone`.
    """

    def __init__(self, job: JobSession | None) -> None:
        self._job = job
        self.are_off = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Turn collectives into no-ops, as with one worker, because the others do not take part in them."""
        self.are_off = True
        try:
            yield
        finally:
            self.are_off = False

    def confirmed(
        self, kind: str, run: Callable[[], T], details: str = "", *, same_line: bool = False, is_joint: bool = True
    ) -> T:
        """Run a collective of all workers, once they have confirmed that all of them are about to run it.

        Args:
            kind: name in the error if they are not.
            details: further text that workers compare.
            same_line: whether the user's code must have called it from the same line on all workers.
            is_joint: whether no worker gets the result before all have begun the collective.
        """
        live = self._job.live if self._job is not None else None
        if live is None:
            return run()
        frame = sys._getframe(1)

        def compared() -> T:
            with live.world.compared(lambda: Purpose(kind, details, place_of(frame), same_line)):
                live.collectives.check_group()
                return run()

        return live.collectives.run(compared, is_joint)

    def barrier(self, run: Callable[[], None], name: str) -> None:
        if not self.are_off:
            self.confirmed("strategy.barrier", run, name)

    def broadcast(self, run: Callable[[T, int], T], obj: T, src: int, device: torch.device) -> T:
        """Return the object of worker `src`.

        Args:
            run: Lightning's own, for a world that cannot change. It unpickles whatever arrives.
            device: where tensors arrive that are on the source's device.

        Raises:
            TransferError: it holds a class that is not accepted from other workers.
        """
        if self.are_off:
            return obj
        if self._job is None:
            return run(obj, src)

        def send() -> T:
            sent: T = transfer.broadcast_object(obj, src, device) if dist.is_initialized() else obj
            return sent

        # The source does not wait for the others.
        return self.confirmed("strategy.broadcast", send, f"what rank {src} has", is_joint=False)

    def reduce(self, run: Callable[..., Any], tensor: Any, group: Any | None, reduce_op: Any) -> Any:
        if not isinstance(tensor, Tensor) or self.are_off:
            return tensor
        if not tensor.is_floating_point() and str(reduce_op).lower() in ("mean", "avg"):
            tensor = tensor.double()  # a mean is otherwise rounded to the tensor's type, such as the type of sample counts
        if group is not None and group is not dist.group.WORLD:
            return run(tensor, group, reduce_op)  # a group of some workers only, which no round can repeat
        name = logged_name(sys._getframe(2))  # the caller of `strategy.reduce`
        # On a copy, as a reduction works in place: a failed attempt must leave the input of the next one untouched.
        result = self.confirmed(
            "strategy.reduce",
            lambda: run(tensor.clone(), group, reduce_op),
            f"{_described(tensor)} ({reduce_op})" + (f", logged as {name!r}" if name else ""),
            same_line=not name,
        )
        return result.to(tensor.device)  # a result taken from another worker arrives on the CPU

    def decide(self, total: Callable[[], Tensor], world_size: Callable[[], int], decision: bool, needs_all: bool) -> bool:
        """Return the decision of all workers.

        Args:
            total: sums up the workers' decisions.
            needs_all: whether all of them have to agree; else one is enough.
        """

        def count() -> bool:
            # Compared with the size of the world that took the vote: a worker may take over the answer in a smaller one.
            votes = total()
            return bool(votes == world_size()) if needs_all else bool(votes)

        return decision if self.are_off else self.confirmed("strategy.reduce_boolean_decision", count)

    def all_gather(self, run: Callable[..., Tensor], tensor: Tensor, group: Any | None, sync_grads: bool) -> Tensor:
        if self.are_off:
            return tensor
        if group is dist.group.WORLD:
            group = None  # `LightningModule.all_gather` names the current one, which a loss replaces
        if group is not None:
            return run(tensor, group, sync_grads)
        result = self.confirmed(
            "strategy.all_gather", lambda: run(tensor, group, sync_grads), _described(tensor), same_line=True
        )
        return result.to(tensor.device)  # a result taken from another worker arrives on the CPU


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
