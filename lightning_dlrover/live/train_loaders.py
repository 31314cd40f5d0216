"""The training loaders of a fit, and the settings of them that a plan changes."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lightning_dlrover.checks import UnsupportedLoaderError
from lightning_dlrover.data.lane_plan import Layout
from lightning_dlrover.live import lightning_adapter
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.order import UNKNOWN, FitPosition, Peers, global_batch_of_next
from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.job.events import SettingsApplied
from lightning_dlrover.rdzv.job.records import PlanRecord

if TYPE_CHECKING:
    import lightning as L

log = logging.getLogger(__name__)

# Apply a plan's threads, loader workers and prefetching in one worker while it trains.
#
# Workers need not agree on the time, because none of these changes which samples a worker gets. `live/loader_workers.py`
# replaces loader workers without a pause. The number of workers is a matter of rounds (`live/training.py`).


@dataclass(frozen=True)
class _Settings:
    loader_workers: list[int]  # one per loader
    prefetch_factor: list[int]
    intra_op_threads: int

    def __str__(self) -> str:
        workers, ahead = ("+".join(map(str, of_loaders)) for of_loaders in (self.loader_workers, self.prefetch_factor))
        return f"{workers} loader workers, {ahead} batches ahead, {counted(self.intra_op_threads, 'thread')}"


class SettingsInForce:
    """Follows the plan. Settings that it leaves open stay as they are, at first as in the user's script.

    Args:
        cores: cores that this worker may use. It never computes with more threads. It has more loader workers only if the
            user's loader or a manual plan requests them, because other plans may be made for larger nodes.
        threads_per_core: threads for each core where no plan sets their number; 0: as many as the user has chosen.
    """

    def __init__(self, cores: float, threads_per_core: float = 0.0) -> None:
        self._cores = max(1, int(cores))
        self._threads_per_core = threads_per_core
        self._set_threads = 0  # most threads that the script or a plan has set
        self._threads: int | None = None  # threads for a new number of cores, unless the plan sets them; None: as now
        self._plan: PlanRecord | None = None  # the plan that was last carried out
        self._loaders: Sequence[ElasticLoader] = ()  # loaders of that plan; a Trainer may make new ones for each epoch
        self._begun: tuple[PlanRecord, _Settings] | None = None  # plan under way, and the settings before it

    def set_cores(self, cores: float) -> None:
        """Note how many cores this worker may use now; `follow` applies it."""
        if (number := max(1, int(cores))) == self._cores:
            return
        own, threads = self._own_threads, torch.get_num_threads()
        self._cores, self._plan = number, None
        # Threads that the script or a plan has set stay, as far as there are cores for them.
        self._set_threads = max(self._set_threads, threads)
        self._threads = self._own_threads if threads == own else min(self._set_threads, number)

    @property
    def _own_threads(self) -> int:
        """Threads of this worker where no plan sets their number; 0: as the user has chosen."""
        return max(1, int(self._cores * self._threads_per_core)) if self._threads_per_core else 0

    def follow(
        self, plan: PlanRecord | None, loaders: Sequence[ElasticLoader], may_add_workers: bool
    ) -> tuple[SettingsApplied, str] | None:
        """Apply as much of the plan as possible. Call it between any two batches.

        Args:
            may_add_workers: whether the planner may give loader workers to any dataset whose loader has none.

        Returns:
            The change and its text, once it is complete.
        """
        if plan is None or (plan is self._plan and loaders == self._loaders):
            return None
        if self._begun is None or self._begun[0] is not plan:
            self._begun = plan, _in_force(loaders)
            for loader in loaders:
                loader.workers.handover_s = 0.0
        threads = self._threads
        if plan.intra_op_threads is not None:
            threads = min(plan.intra_op_threads or self._cores, self._cores)
        if threads is not None and threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        self._threads = None
        refusals = {loader.workers.refusal for loader in loaders}
        wanted = [self._loader_workers(plan, loader, may_add_workers) for loader in loaders]
        under_way = [x for x, number in zip(loaders, wanted, strict=True) if not x.workers.retune(number, plan.prefetch_factor)]
        if under_way:
            return None
        before, now = self._begun[1], _in_force(loaders)
        self._plan, self._loaders, self._begun = plan, loaders, None
        refused = "; ".join(sorted({loader.workers.refusal for loader in loaders} - refusals))
        if refused:
            log.warning("loader workers stay as they are: %s", refused)
        if now == before and not refused:
            return None
        seconds = sum(loader.workers.handover_s for loader in loaders) if now != before else 0.0
        text = f"{now} on each worker, instead of {before}" + (f"; not more loader workers: {refused}" if refused else "")
        return SettingsApplied(**asdict(now), before=asdict(before), seconds=seconds, refused=refused), text

    def _loader_workers(self, plan: PlanRecord, loader: ElasticLoader, may_add_workers: bool) -> int | None:
        if plan.loader_workers is None or plan.source == "user":
            return plan.loader_workers
        if loader.workers.would_be_first and not may_add_workers:
            return None
        wanted = min(plan.loader_workers, max(self._cores, loader.workers.users_number))
        return loader.order.fitting_loader_workers(wanted)


def _in_force(loaders: Sequence[ElasticLoader]) -> _Settings:
    return _Settings(
        [loader.num_workers for loader in loaders],
        [loader.prefetch_factor for loader in loaders],
        torch.get_num_threads(),
    )


# Treat several training loaders as one: a common counter, one order's seed for all workers, one weight for a batch's loss.
#
# Lightning's `CombinedLoader` fetches from each loader in turn. The first one holds the point at which the world may
# change. So all of them count the Trainer's batches, whether they have begun again (`max_size_cycle`) or have ended
# (`max_size`).


@dataclass(eq=False)
class TrainLoaders:
    """The training loaders of a Trainer, which may make new ones for each epoch, and state that outlives them."""

    _trainer: L.Trainer
    _position: FitPosition
    _has_global_batch_size: bool  # whether the strategy was given one, which holds for each loader
    _order_seeds: Sequence[int] = ()
    _known: Sequence[ElasticLoader] = ()
    _made: list[ElasticLoader] = field(default_factory=list)  # all of this Trainer that may have processes, also validation's
    _has_warned: bool = False
    may_add_workers: bool = False  # whether a plan may give loader workers to any dataset whose loader has none
    _counted: Sequence[int] = ()  # global batches by which the Trainer counts an epoch's batches
    _former: Iterator[ElasticLoader] = field(default_factory=lambda: iter(()))  # loaders that the script's next ones replace
    _are_made_again: bool = False  # whether all workers have such loaders, and make others together
    _size_when_made: int = 0  # workers
    saved: Mapping[str, Any] = field(default_factory=dict)  # each loader's part of the checkpoint that is being resumed
    computed: int | None = None  # batch under computation, if not the last one handed out

    @property
    def all(self) -> list[ElasticLoader]:
        combined = lightning_adapter.combined_loader(self._trainer.fit_loop)
        assert combined is not None
        return [loader for loader in combined.flattened if isinstance(loader, ElasticLoader)]

    @property
    def first(self) -> ElasticLoader:
        return self.all[0]

    @property
    def are_made(self) -> bool:
        return lightning_adapter.combined_loader(self._trainer.fit_loop) is not None and bool(self.all)

    @property
    def batch_number(self) -> int:
        """Number of batches handed out over all epochs."""
        # Not derived from the epoch: new loaders may be shorter, and this number must grow.
        return self._trainer.fit_loop.epoch_loop.batch_progress.total.ready

    @property
    def refusal(self) -> str:
        """Reason why a plan cannot change the workers of a loader; empty if it can change those of all."""
        if not self.may_add_workers and any(loader.workers.would_be_first for loader in self.all):
            return "the script's DataLoader has num_workers=0, and its dataset may depend on the training process"
        return next((loader.workers.refusal for loader in self.all if loader.workers.refusal), "")

    def keep_step(self) -> None:
        """Make new loaders count through the Trainer's epoch. Call it before each fetch.

        Raises:
            UnsupportedLoaderError: one global batch size was given for loaders of several batch sizes, or one of several
                loaders reads an `IterableDataset`.
        """
        combined, loaders = lightning_adapter.combined_loader(self._trainer.fit_loop), self.all
        assert combined is not None
        for loader in loaders:
            if loader.iterable is not None:
                loader.iterable.redo_batches = self._trainer.accumulate_grad_batches + 1
        if len(loaders) == len(self._known) and all(new is known for new, known in zip(loaders, self._known, strict=True)):
            return
        sizes = [loader.batch_sampler.batch_size for loader in loaders]
        if self._has_global_batch_size and len(set(sizes)) > 1:
            raise UnsupportedLoaderError(
                f"there are {len(loaders)} training loaders with batch sizes {sizes}, and global_batch_size would give each of "
                "them the same: leave it out of DLRoverStrategy, then each loader's global batch is its own batch size times "
                "the workers that the job starts with"
            )
        if len(loaders) > 1 and (without := next((x.iterable for x in loaders if x.iterable is not None), None)) is not None:
            raise UnsupportedLoaderError(
                f"there are {len(loaders)} training loaders, one of them of the IterableDataset {without.name}: its end is not "
                "known before, so the loaders cannot be kept in step when workers join or leave. Use one DataLoader, with a "
                "dataset that yields the samples of all, or map-style datasets"
            )
        num_batches = self._trainer.num_training_batches
        for loader in loaders:
            loader.keep_step(
                int(num_batches) if math.isfinite(num_batches) else None,
                cycles=combined._mode == "max_size_cycle",
            )
        self._known, self._counted = loaders, self._global_batches
        self.close_unused()
        self.take_order_seeds(self._order_seeds)

    def before_set_up(self) -> None:
        """Prepare for loaders that the script may make in place of these."""
        self._are_made_again = self.are_made
        self._former = iter(self.all if self.are_made else ())

    def after_set_up(self) -> None:
        if self.are_made and self.all != [*self._known]:
            self._size_when_made = self._position.size

    def global_batch(self, batch_size: int, default: int, peers: Peers) -> int:
        """Return the global batch of a loader that the script has made.

        Args:
            default: that of the first loader.
            peers: all of them take rank 0's.
        """
        if (former := next(self._former, None)) is None:
            return default
        sizes = self._size_when_made, self._position.size
        former_batch, former_global = former.users_batch_size, former.global_batch_size
        found = peers.of_rank_zero(global_batch_of_next(batch_size, former_batch, former_global, sizes))
        if batch_size != former_batch and found == former_global and self._position.rank == 0:
            log.warning(
                "the script's DataLoader has batches of %d with %d workers, and had batches of %d with %d: it divides by the "
                "number of workers itself, so a step keeps %d samples. If it does not, set "
                "DLRoverStrategy(global_batch_size=...)",
                *(batch_size, sizes[1], former_batch, sizes[0], found),
            )
        return found

    def agree_on_layout(self, made: ElasticLoader, peers: Peers) -> None:
        """Give rank 0's layout to a loader that the script makes in place of another one, as to the first ones."""
        layout = made.order.layout
        if self._are_made_again and layout is not None:
            made.order.take_layout(Layout(**peers.of_rank_zero(asdict(layout))))

    def attend(self, made: ElasticLoader) -> None:
        """Close a loader of any kind as soon as the Trainer no longer uses it."""
        self._made.append(made)

    def close_unused(self) -> None:
        """End the processes of loaders that the Trainer has replaced. Lightning closes only loaders of torch's own."""
        loops = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.val_loop
        combined = (lightning_adapter.combined_loader(loop) for loop in loops)
        in_use = [loader for each in combined if each is not None for loader in each.flattened]
        for loader in [made for made in self._made if not any(made is used for used in in_use)]:
            loader.close()
            self._made.remove(loader)

    @property
    def orders_now(self) -> list[tuple[int, dict[str, int] | None]]:
        """Seed and layout of each loader, as plain data."""
        layouts = [loader.order.layout for loader in self.all]
        return [(x.order.seed, asdict(layout) if layout else None) for x, layout in zip(self.all, layouts, strict=True)]

    def take_orders(self, orders: Sequence[tuple[int, Mapping[str, int] | None]]) -> None:
        """Adopt rank 0's orders. The same files may have other sizes on another host, and so another layout."""
        self.take_order_seeds([seed for seed, _ in orders])
        for loader, (_, layout) in zip(self.all, orders, strict=False):
            loader.order.take_layout(Layout(**layout) if layout is not None else None)

    def take_order_seeds(self, seeds: Sequence[int]) -> None:
        """Give each loader, and its later replacement, the job's order."""
        self._order_seeds = seeds
        for loader, seed in zip(self._known, seeds, strict=False):
            loader.order.take_seed(seed)

    def prepare_next(self) -> None:
        for loader in self.all:
            loader.prepare_next()

    # --- streams that grow ----------------------------------------------------------------------------------------------------

    @property
    def grow(self) -> bool:
        """Whether each epoch has other rows, and so another number of batches."""
        return any(loader.order.grows for loader in self.all)

    @property
    def _global_batches(self) -> list[int]:
        """Global batches of the loaders whose length is known."""
        return [loader.global_batch_size for loader in self.all if loader.iterable is None]

    @property
    def has_ended(self) -> bool:
        """Whether a stream that grows has no rows for this epoch."""
        return any(loader.order.grows and not loader.order.num_samples for loader in self.all)

    def next_windows(self) -> list[dict[str, list[int]] | None]:
        """Wait for the rows of the epoch that begins; return them for each loader whose stream grows."""
        for loader in self.all:
            if loader.order.grows:
                loader.set_epoch(self._epoch_to_begin)
        return [loader.order.window if loader.order.grows else None for loader in self.all]

    def begin_windows(self, windows: Sequence[dict[str, list[int]] | None]) -> None:
        """Begin an epoch with these rows."""
        for loader, window in zip(self.all, windows, strict=True):
            if window is not None:
                loader.order.take_window(window, self._epoch_to_begin)
                loader.set_epoch(self._epoch_to_begin)

    @property
    def _epoch_to_begin(self) -> int:
        progress: Any = self._trainer.fit_loop.epoch_progress
        return int(progress.current.processed)

    def recount(self) -> None:
        """Recount the epoch's batches if a stream has another number of rows, or another worker another global batch."""
        if self.grow or self._counted != self._global_batches:
            lightning_adapter.recount_batches(self._trainer)
            self._known = ()  # so that the loaders keep step with the new number
            if self._position.has_entered or self._position.is_standby:
                self.keep_step()

    # --- this worker's share ------------------------------------------------------------------------------------------------

    def loss_weight(self, batch: int) -> float:
        """Return the weight of a worker's mean loss in a batch, by its share of the first loader that takes part."""
        weights = [split.loss_weight(batch) for loader in self._known if (split := loader.split).has_samples(batch)]
        if not self._has_warned and weights and max(weights) - min(weights) > 1e-9:
            self._has_warned = True
            log.warning(
                "the global batches of the training loaders (%s samples) are not split equally over %d workers: the loss is "
                "weighted by the share of the first one. Batch sizes that all numbers of workers divide make it exact",
                ", ".join(str(loader.global_batch_size) for loader in self._known),
                self._known[0].world_size,
            )
        return weights[0] if weights else 1.0

    @property
    def current_loss_weight(self) -> float:
        """Weight of this worker's mean loss in the batch under computation; 1 when all shares are equal."""
        if not self._trainer.training or self._position.size == 1:
            return 1.0
        return self.loss_weight(self._batch_under_computation)

    @property
    def _batch_under_computation(self) -> int:
        return self.first.cursor - 1 if self.computed is None else self.computed

    @property
    def sample_weight(self) -> float:
        """Weight of this worker's share of the last training batch, relative to an equal share."""
        if not self.are_made or not self.first.cursor:
            return 1.0
        batch = self.first.cursor - 1
        return self.loss_weight(batch) if self.first.split.has_samples(batch) else 1.0

    @property
    def num_own_samples(self) -> int:
        """This worker's share of the training batch under computation."""
        return self.first.split.num_own_samples(self._batch_under_computation)

    @property
    def in_checkpoint(self) -> dict[str, list[Any]]:
        """Each training loader's place in its data as plain data, see `ElasticLoader.resume`; None for data of another kind."""
        loaders = self.all if self.are_made else []
        return {
            "streams": [loader.position_in_stream for loader in loaders],
            "iterables": [loader.iterable and loader.iterable.in_checkpoint() for loader in loaders],
            "orders": [loader.order_in_checkpoint for loader in loaders],
        }

    # --- position -------------------------------------------------------------------------------------------------------------

    def begin_at(self, cursor: int) -> None:
        """Continue an epoch at a batch, for example where a checkpoint from inside an epoch was resumed.

        Raises:
            DataError: the rows after the checkpoint's last batch cannot be found, as they are laid out in another way here.
        """
        for number, loader in enumerate(self.all):
            loader.cursor = cursor
            if self.saved:
                saved = [self.saved.get(name, ()) for name in ("orders", "streams", "iterables")]
                loader.resume(*(each[number] if number < len(each) else None for each in saved))
        self.saved = {}
        self._fetcher.fetched = cursor

    @property
    def _fetcher(self) -> Any:
        return self._trainer.fit_loop._data_fetcher

    def lead_fetcher(self) -> None:
        """Bring Lightning's fetcher to the loaders' position."""
        fetcher, loader = self._fetcher, self.first
        fetcher.fetched = loader.cursor
        if loader.iterable is not None:
            fetcher.length = None if loader.split.num_samples == UNKNOWN else loader.num_epoch_batches
        fetcher.done = loader.cursor >= loader.num_epoch_batches  # a received state may be from an epoch's end

    def refetched(self, num_batches: int) -> list[Any]:
        """Return the last batches handed out, split for the current world, as arguments of the training step."""
        trainer, loaders, position = self._trainer, self.all, self._position
        for loader in loaders:
            # The shares stay by speed where this worker alone takes the batches again, as after memory ran out.
            loader.reshard(position.rank, position.size, num_batches, position.speeds)
        steps = []
        epoch_loop = trainer.fit_loop.epoch_loop
        for i in range(num_batches):
            batch = trainer.precision_plugin.convert_input(self._next_again(loaders))
            batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            batch_idx = epoch_loop.batch_progress.current.ready - num_batches + i
            steps.append(epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx))
        return steps

    def _next_again(self, loaders: Sequence[ElasticLoader]) -> Any:
        """Return the next batch of all loaders, as Lightning combines it, without its iterators."""
        combined = lightning_adapter.combined_loader(self._trainer.fit_loop)
        assert combined is not None
        parts: list[Any] = []
        for loader in loaders:
            try:
                parts.append(loader.refetch())
            except StopIteration:
                parts.append(None)  # this loader is shorter than the others, in mode `max_size`
        return torch.utils._pytree.tree_unflatten(parts, combined._spec)

    def close(self) -> None:
        """End the processes of all loaders."""
        for loader in self._made:
            loader.close()
        self._made = []
