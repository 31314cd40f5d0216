"""Replace the data loaders that Lightning hands to the strategy by loaders that split their batches over the workers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch.utils.data import DataLoader

from lightning_dlrover.checks.loaders import UnsupportedLoaderError, batching_of, check_data_loader, check_step_signature
from lightning_dlrover.data.dataset import Stream
from lightning_dlrover.live.lightning_names import takes_iterator
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.sequences import settings_for
from lightning_dlrover.packages import TrainerFn

if TYPE_CHECKING:
    from lightning_dlrover.live.place_in_job import JobSession
    from lightning_dlrover.live.training import LiveTraining

__all__ = ["UsersLoaders"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class PlacedStrategy(Protocol):
    """A strategy with its place among the workers of a round."""

    @property
    def own_place(self) -> tuple[int, int]:
        """This worker's rank, 0 if it is alone, and the number of workers."""

    def broadcast(self, obj: T, src: int = 0) -> T: ...


class JobPeers:
    """The workers of a live job, see `order.Peers`."""

    def __init__(self, strategy: PlacedStrategy, live: LiveTraining) -> None:
        self._strategy = strategy
        self._live = live

    @property
    def place(self) -> tuple[int, int]:
        return self._strategy.own_place

    @property
    def owned_sockets(self) -> Sequence[tuple[int, int]]:
        return self._live.world.owned_sockets

    def of_rank_zero(self, mine: T) -> T:
        return self._strategy.broadcast(mine, 0)


class UsersLoaders:
    """The loaders of a strategy's Trainers.

    Args:
        global_batch_size: samples per training step over all workers; None: derived from the loader's batch size.
        max_catch_up_s: seconds for which workers wait for a joiner that reads an `IterableDataset` up to their place.
        compare_data: whether workers compare samples.
    """

    def __init__(self, global_batch_size: int | None, max_catch_up_s: float = 60.0, compare_data: bool = True) -> None:
        self._global_batch_size = global_batch_size
        self._max_catch_up_s = max_catch_up_s
        self._compare_data = compare_data
        self._are_split_by_user: bool | None = None  # whether the Trainer was made with `use_distributed_sampler=False`

    def keep_samplers(self, trainer: Any) -> None:
        """Keep Lightning from replacing samplers: its own shuffles every training loader, even where the user does not."""
        connector = trainer._accelerator_connector
        if self._are_split_by_user is None:
            self._are_split_by_user = not connector.use_distributed_sampler
        # Lightning splits predictions itself, because it needs their indices.
        connector.use_distributed_sampler = trainer.state.fn == TrainerFn.PREDICTING and not self._are_split_by_user

    def replaced(
        self,
        dataloader: object,
        trainer: Any,
        job: JobSession | None,
        strategy: PlacedStrategy,
    ) -> object:
        """Return the loader to use for one of the user's: one of ours in a live job, except for predictions."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        live = job.live if job is not None else None
        if isinstance(dataloader, ElasticLoader):
            dataloader = dataloader.users_loader  # Lightning has put ours into the user's CombinedLoader
        training = bool(trainer.training or (fitting and trainer.state.stage == "train"))
        if live is not None and isinstance(data := getattr(dataloader, "dataset", None), Stream):
            live.windows.attend(data, trainer.current_epoch)
            if data.grows:
                _begin_window(data, dataloader, trainer, training)
        if job is None or live is None or trainer.predicting or (not fitting and not isinstance(dataloader, DataLoader)):
            return dataloader
        if fitting:
            check_data_loader(dataloader, self._are_split_by_user is True, "train_dataloader" if training else "val_dataloader")
            check_step_signature(training and takes_iterator(trainer.lightning_module))
        assert isinstance(dataloader, DataLoader)
        job.agree_on_start()
        peers = JobPeers(strategy, live)
        try:
            batch_size = batching_of(dataloader).batch_size
            global_batch = batch_size * job.start_workers
            if training and self._global_batch_size is not None:
                global_batch = self._global_batch_size
            elif training:
                global_batch = live.loaders.global_batch(batch_size, global_batch, peers)
            made = ElasticLoader(
                dataloader,
                global_batch,
                training=training,
                before_next=live.boundary if training else None,
                peers=peers,
                max_workers=job.lane_workers,
                sequence=settings_for(trainer, training, global_batch, self._max_catch_up_s, self._compare_data),
            )
        except UnsupportedLoaderError as error:
            if fitting:
                raise
            # The loader was not known before, and a job that has trained for days must not end here.
            log.warning(
                "this loader is not split over the workers: each one computes all batches that the loader gives it, which "
                "leaves means as they are, and counts samples once per worker in sums over workers. The reason: %s",
                error,
            )
            return dataloader
        if training:
            live.loaders.agree_on_layout(made, peers)
        live.loaders.attend(made)
        return made


def _begin_window(data: Stream, dataloader: object, trainer: Any, training: bool) -> None:
    """Let a stream that grows have the rows of the epoch that begins.

    Raises:
        UnsupportedLoaderError: rows of it would never be trained.
    """
    if not training:
        raise UnsupportedLoaderError(
            f"{data.source!r:.120} goes on for ever, and a loader for validation, test or prediction has to end: give its "
            "source a place to stop, such as kafka(..., stop='latest')"
        )
    limit = trainer.limit_train_batches
    is_limited = (isinstance(limit, int) or limit != 1.0) and not trainer.fast_dev_run
    if is_limited or trainer.overfit_batches:
        raise UnsupportedLoaderError(
            f"limit_train_batches={limit} and overfit_batches={trainer.overfit_batches} would leave rows "
            f"of each window of {data.source!r:.120} out for ever: set the length of an epoch with kafka(..., window_rows=...)"
        )
    if isinstance(dataloader, DataLoader) and batching_of(dataloader).drop_last:
        raise UnsupportedLoaderError(
            f"drop_last=True would leave the last rows of each window of {data.source!r:.120} out for ever, and end training "
            "at a window smaller than a batch: leave it out, a smaller last batch is weighted by its rows"
        )
    data.set_epoch(trainer.current_epoch)
