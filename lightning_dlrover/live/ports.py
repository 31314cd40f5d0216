"""The four things that the parts of a live fit work with: the job, its round, the batches, and the Trainer.

`LiveTraining` makes them and gives each part those that it uses. The fifth, this worker's `FitPosition`, is plain data.

| port | is | implemented by |
| --- | --- | --- |
| `Job` | the job's records and events, whoever trains | `rdzv.group.world.World` |
| `Round` | rank and size now, collectives that survive a loss | `ResilientCollectives` |
| `Batches` | the training loaders, and the order of their samples | `TrainLoaders` |
| `TrainerPort` | Lightning: module, optimizers, loops, and the strategy | `TrainerOfFit` |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from lightning_dlrover.live import lightning_adapter

if TYPE_CHECKING:
    import lightning as L

    from lightning_dlrover.live.lightning_adapter import EpochLoop
    from lightning_dlrover.live.loader import ElasticLoader
    from lightning_dlrover.live.replica import LiveStrategy
    from lightning_dlrover.rdzv.desync import Purpose
    from lightning_dlrover.rdzv.group.config import WorldConfig
    from lightning_dlrover.rdzv.group.failures import JobStanding
    from lightning_dlrover.rdzv.job.events import Event
    from lightning_dlrover.rdzv.membership.member import Formation
    from lightning_dlrover.rdzv.membership.membership import Membership
    from lightning_dlrover.rdzv.membership.rounds import WorkerView
    from lightning_dlrover.rdzv.membership.worker_records import SharedRecords
    from lightning_dlrover.rdzv.transport.transfer import HostStateCache, Packed
    from lightning_dlrover.tables.elastic import ElasticTables

# Lightning's Trainer, as the parts of a live fit use it.


class TrainerOfFit:
    """One Trainer and its strategy, see `ports.TrainerPort`. Both change while a `fit` runs, so nothing is kept of them."""

    def __init__(self, trainer: L.Trainer, strategy: LiveStrategy) -> None:
        self.lightning = trainer
        self.strategy = strategy

    @property
    def module(self) -> L.LightningModule:
        return self.lightning.lightning_module

    @property
    def is_automatic(self) -> bool:
        return self.module.automatic_optimization

    @property
    def optimizers(self) -> list[Any]:
        return self.lightning.optimizers

    @property
    def callbacks(self) -> list[Any]:
        return self.lightning.callbacks  # type: ignore[attr-defined, no-any-return]  # Lightning does not declare them

    @property
    def accumulate_grad_batches(self) -> int:
        return self.lightning.accumulate_grad_batches

    @property
    def global_step(self) -> int:
        return self.lightning.global_step

    @property
    def current_epoch(self) -> int:
        return self.lightning.current_epoch

    @property
    def epoch_loop(self) -> EpochLoop:
        return self.lightning.fit_loop.epoch_loop

    @property
    def num_handed_out(self) -> int:
        progress = self.epoch_loop.batch_progress
        return progress.current.ready

    @property
    def results(self) -> Any:
        return lightning_adapter.results_of(self.epoch_loop)

    @property
    def device(self) -> torch.device:
        return self.strategy.root_device

    @property
    def elastic_tables(self) -> ElasticTables | None:
        return self.strategy.elastic_tables


T = TypeVar("T")


class Job(Protocol):
    """The job as its records in etcd describe it, and this worker's name in it."""

    @property
    def worker_id(self) -> str: ...

    @property
    def config(self) -> WorldConfig: ...

    @property
    def membership(self) -> Membership: ...

    @property
    def view(self) -> WorkerView:
        """This worker's newest view of the job. It may lag behind etcd."""

    @property
    def records(self) -> SharedRecords: ...

    @property
    def standing(self) -> JobStanding:
        """What the job's record holds of its fits, and whether joiners can enter."""

    @property
    def num_fits(self) -> int:
        """Calls of `fit` that the script has made so far."""

    @property
    def has_finished(self) -> bool: ...

    @property
    def left_state(self) -> HostStateCache | None:
        """Folder for the state that outlives this agent's workers; None if there is none."""

    def event(self, event: Event, text: str) -> None:
        """Queue one line for the job's history; never blocks."""

    def finish(self, num_steps: int, fit: int = 1) -> None:
        """Record that all steps of this `fit` are made."""

    def keep_for_successors(self, step: int, packed: Packed) -> None:
        """Keep the state in this host's memory for the agent's next workers."""


class Round(Protocol):
    """The round that this worker is in, and collectives among its members. None of them outlives the round."""

    wishes: list[int]
    """Minimum over all members of each number in the newest vote; empty once it was counted."""

    @property
    def formation(self) -> Formation | None:
        """The current round; None on a worker that is not admitted yet."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """Workers of the round; 1 on a worker that is not admitted yet."""

    @property
    def broken(self) -> bool:
        """Whether the round has ended for good."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether the host does not wait for the backend's collectives, as with NCCL."""

    @property
    def num_begun(self) -> int:
        """Collectives that this worker has begun in the round."""

    @property
    def has_missed_result(self) -> bool: ...

    def is_failure(self, error: BaseException) -> bool:
        """Whether an error means that the round is broken, and not a mistake of the user."""

    def alone(self, reason: str) -> AbstractContextManager[None]:
        """Refuse collectives within the context, because the other workers do not run this code now."""

    def compared(self, purpose: Callable[[], Purpose]) -> AbstractContextManager[None]:
        """Compare this worker's next action with that of all others."""

    def all_reach(self, place: str, timeout_s: float | None = None) -> bool:
        """Wait until all workers have reached `place`; False once one of them has passed it by."""

    def gathered(self, mine: Any) -> list[Any]:
        """Return all workers' values by rank. A failure is the caller's to handle."""

    def exchange(self, what: str, run: Callable[[], T]) -> T:
        """Run a named collective outside of steps, and repeat it after a loss."""

    def attempt(self, run: Callable[..., T], *args: Any) -> tuple[T] | None:
        """Return the result of a function with collectives; None if one failed, after which the caller has to `recover`."""

    def recover(self) -> bool:
        """Form the next round with the survivors. Return whether this step's update was taken over from another worker."""

    def renew_if_broken(self) -> None:
        """Form the next round if this one has ended. Call it where no unfinished work would have to be repeated."""

    def named(self, what: str, run: Callable[[], T]) -> T:
        """Run collectives under one name, which all workers must share."""

    def once(self, run: Callable[[], T]) -> tuple[T] | None:
        """Run a collective that must not be repeated before a loss is handled; None if no worker has its result."""

    def check_gradients(self) -> None:
        """Raise if gradients may come from an aborted reduction."""

    def wait_for_results(self) -> None:
        """Wait until the results of all collectives are there."""

    def forget(self) -> None:
        """Drop the results of collectives, because all workers go back to a snapshot."""


class Batches(Protocol):
    """The training loaders, which take the same place in the data on all workers."""

    computed: int | None
    """Batch under computation, if it is not the last one handed out."""

    @property
    def all(self) -> list[ElasticLoader]: ...

    @property
    def first(self) -> ElasticLoader: ...

    @property
    def are_made(self) -> bool: ...

    @property
    def batch_number(self) -> int:
        """Batches handed out over all epochs."""

    @property
    def refusal(self) -> str:
        """Reason why a plan cannot change the workers of a loader; empty if it can."""

    @property
    def num_own_samples(self) -> int:
        """This worker's share of the batch under computation."""

    @property
    def sample_weight(self) -> float:
        """Weight of this worker's share of the last batch, relative to an equal share."""

    @property
    def current_loss_weight(self) -> float:
        """Weight of this worker's mean loss in the batch under computation."""

    def refetched(self, num_batches: int) -> list[Any]:
        """Return the last batches handed out, split for the current world, as arguments of the training step."""

    def begin_at(self, cursor: int) -> None: ...

    def recount(self) -> None: ...

    def lead_fetcher(self) -> None: ...

    def take_order_seeds(self, seeds: Sequence[int]) -> None: ...

    def prepare_next(self) -> None: ...

    def close_unused(self) -> None: ...


class TrainerPort(Protocol):
    """Lightning's Trainer as a live fit uses it, with the strategy's part of it."""

    @property
    def lightning(self) -> L.Trainer:
        """The Trainer itself, for functions that use its private names."""

    @property
    def strategy(self) -> LiveStrategy: ...

    @property
    def module(self) -> L.LightningModule: ...

    @property
    def is_automatic(self) -> bool:
        """Whether Lightning steps the optimizers, and not the user."""

    @property
    def optimizers(self) -> list[Any]: ...

    @property
    def callbacks(self) -> list[Any]: ...

    @property
    def accumulate_grad_batches(self) -> int: ...

    @property
    def global_step(self) -> int: ...

    @property
    def current_epoch(self) -> int: ...

    @property
    def epoch_loop(self) -> EpochLoop: ...

    @property
    def num_handed_out(self) -> int:
        """Batches of this epoch that the loop has received, the one under computation included."""

    @property
    def results(self) -> Any:
        """Values that the training epoch has logged so far."""

    @property
    def device(self) -> torch.device: ...

    @property
    def elastic_tables(self) -> ElasticTables | None:
        """The model's sharded tables; None if it has none."""
