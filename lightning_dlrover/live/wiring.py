"""What the strategy puts in place of Lightning's own parts: environment, collectives, loops and data loaders."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dlrover.checks import UnsupportedLoaderError, batching_of, check_data_loader, check_step_signature
from lightning_dlrover.data.dataset import Stream
from lightning_dlrover.lightning_compat import TrainerFn, fabric_submodule, on_import, package_of, submodule
from lightning_dlrover.live.data_agreement import settings_for
from lightning_dlrover.live.lightning_adapter import Method, logged_name, restore_sigterm, surround, validates_by_clock
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.replica import LiveStrategy
from lightning_dlrover.live.validation import exchange_metrics_through
from lightning_dlrover.rdzv.desync import CollectiveCall, place_of
from lightning_dlrover.rdzv.group.config import is_in_job
from lightning_dlrover.rdzv.transport import transfer

if TYPE_CHECKING:
    from lightning_dlrover.live.training import JobSession, LiveTraining

log = logging.getLogger(__name__)

# Lightning's view of a worker's place in the job: ranks that change from round to round.


class DLRoverEnvironment:
    """Cluster environment of a job with changing workers. The strategy sets ranks and size at every round.

    Lightning's own TorchElastic environment reads both from variables that are fixed when the process starts.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._local_rank = int(environ.get("LOCAL_RANK", "0"))
        self._node_rank = int(environ.get("GROUP_RANK", "0"))
        self._global_rank = int(environ.get("RANK", "0"))
        self._world_size = int(environ.get("WORLD_SIZE", "1"))

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"  # never used: every round has a store of its own

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return is_in_job(os.environ)

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        self._world_size = size

    def global_rank(self) -> int:
        return self._global_rank

    def set_global_rank(self, rank: int) -> None:
        self._global_rank = rank

    def local_rank(self) -> int:
        return self._local_rank

    def node_rank(self) -> int:
        return self._node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept the Trainer's numbers: neither of them decides how many workers there are."""

    def teardown(self) -> None:
        """Leave the environment as it is, because another Trainer of the script may continue with it."""


on_import(lambda package: fabric_submodule(package, "plugins").ClusterEnvironment.register(DLRoverEnvironment))


# The strategy's collectives outside of training steps: which workers meet, and what they compare before they do.

T = TypeVar("T")


@dataclass(eq=False)
class Collectives:
    """Run Lightning's own collectives, repeated after a loss."""

    _job: JobSession | None  # None where the world cannot change; there collectives run as they are
    _strategy: LiveStrategy
    _are_off: bool = False  # see `alone`

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Turn collectives into no-ops, as with one worker, because the others do not take part in them."""
        self._are_off = True
        try:
            yield
        finally:
            self._are_off = False

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
            with live.world.compared(lambda: CollectiveCall(kind, details, place_of(frame), same_line)):
                live.collectives.check_group()
                return run()

        return live.collectives.run(compared, is_joint)

    def barrier(self, run: Callable[[], None], name: str) -> None:
        if not self._are_off:
            self.confirmed("strategy.barrier", run, name)

    def broadcast(self, run: Callable[[T, int], T], obj: T, src: int) -> T:
        """Return the object of worker `src`. Tensors on the source's device arrive on this worker's.

        Args:
            run: Lightning's own, for a world that cannot change. It unpickles whatever arrives.

        Raises:
            TransferError: it holds a class that is not accepted from other workers.
        """
        if self._are_off:
            return obj
        if self._job is None:
            return run(obj, src)

        def send() -> T:
            sent: T = transfer.broadcast_object(obj, src, self._strategy.root_device) if dist.is_initialized() else obj
            return sent

        # The source does not wait for the others.
        return self.confirmed("strategy.broadcast", send, f"what rank {src} has", is_joint=False)

    def reduce(self, run: Callable[..., Any], tensor: Any, group: Any | None, reduce_op: Any) -> Any:
        if not isinstance(tensor, Tensor) or self._are_off:
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

    def decide(self, run: Callable[..., Tensor], decision: bool, needs_all: bool) -> bool:
        """Return the decision of all workers.

        Args:
            run: Lightning's own reduction.
            needs_all: whether all of them have to agree; else one is enough.
        """

        def count() -> bool:
            # Compared with the size of the world that took the vote: a worker may take over the answer in a smaller one.
            votes = run(torch.tensor(int(decision), device=self._strategy.root_device), reduce_op="sum")
            return bool(votes == self._strategy.world_size) if needs_all else bool(votes)

        return decision if self._are_off else self.confirmed("strategy.reduce_boolean_decision", count)

    def all_gather(self, run: Callable[..., Tensor], tensor: Tensor, group: Any | None, sync_grads: bool) -> Tensor:
        if self._are_off:
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


# Replace the methods of Lightning's loops that a change of the world must not break.
#
# Each replacement gets Lightning's own method as its argument, see `surround`. The replacements are attributes of the
# loops' instances, which every `fit` sets again.


def wrap_evaluations(trainer: Any, live: LiveTraining | None) -> None:
    """Replace what every use of a Trainer runs: the exchange of logged values, and the end of each validation dataloader."""
    if live is None:
        return
    live.metrics.attach()
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.fit_loop.epoch_loop.val_loop):
        live.validation.end_each_dataloader(loop)


def wrap_loops(trainer: Any, live: LiveTraining | None, strategy: LiveStrategy) -> None:
    """Replace the methods before a Trainer's loops run. Without a live job steps are only timed."""
    epoch_loop, fit_loop = trainer.fit_loop.epoch_loop, trainer.fit_loop
    automatic, manual = epoch_loop.automatic_optimization, epoch_loop.manual_optimization
    timed = partial(_run_timed, strategy, live)
    if live is None:
        for optimization in (automatic, manual):
            surround(optimization, "run", timed)
        return
    live.fit_begins()
    surround(automatic, "run", partial(timed, live.steps.run_automatic))
    surround(automatic, "_make_closure", live.steps.closure)
    surround(manual, "run", partial(timed, live.steps.run_manual))
    val_loop, validation = epoch_loop.val_loop, live.validation
    surround(val_loop, "run", validation.run)
    surround(val_loop, "reset", partial(validation.begin_batches, val_loop))
    surround(val_loop, "_evaluation_step", partial(validation.step, val_loop))
    exchange_metrics_through(live.collectives)
    surround(fit_loop, "setup_data", live.set_up_data)
    wrap_restarts(fit_loop)
    surround(fit_loop, "on_advance_start", live.begin_epoch)
    surround(fit_loop, "on_run_end", live.hooks.deliver_then)
    _wrap_batches(epoch_loop, fit_loop, live, strategy.tables is not None)
    if validates_by_clock(trainer):
        surround(epoch_loop, "_should_check_val_fx", partial(_decided_by_rank_zero, strategy))
    surround(trainer, "save_checkpoint", live.run_saving)
    epoch_loop._broadcast_sigterm_tensor = _send_no_sigterm
    restore_sigterm(trainer)
    live.world.listen_for_sigterm()
    live.position.is_in_loops = True


def wrap_restarts(fit_loop: Any) -> None:
    """Let a fit that resumes a checkpoint from an epoch's end begin with the first batch of the next one."""
    epoch_loop = fit_loop.epoch_loop
    surround(fit_loop, "reset", partial(_begin_after_ended_epoch, fit_loop))
    surround(epoch_loop, "reset", partial(_reset_ended_epoch, epoch_loop))


def _begin_after_ended_epoch(fit_loop: Any, reset: Callable[[], None]) -> None:
    """Let a checkpoint from an epoch's end begin the next epoch also with `max_steps`.

    With `max_steps` Lightning restarts inside an epoch, which would count the batches of the ended one as done.
    """
    epochs = fit_loop.epoch_progress.current
    if fit_loop.epoch_loop.batch_progress.is_last_batch and epochs.ready == epochs.started == epochs.processed:
        fit_loop._restarting = False  # its property would stay True
        fit_loop.epoch_loop.restarting = False
    reset()


def _reset_ended_epoch(epoch_loop: Any, reset: Callable[[], None]) -> None:
    """Reset an epoch's counters also if a checkpoint is from an epoch's last batch and the next epoch has another length.

    Lightning compares them with the next epoch's number of batches, and would take it for one that has begun, or ended.
    """
    progress = epoch_loop.batch_progress
    is_from_end = getattr(epoch_loop, "restarted_on_train_batch_end", False) and progress.is_last_batch
    reset()
    if is_from_end and progress.current.ready:
        progress.reset_on_run()
        epoch_loop.scheduler_progress.reset_on_run()
        epoch_loop.automatic_optimization.optim_progress.reset_on_run()
        epoch_loop.val_loop.batch_progress.total.reset()


def _wrap_batches(epoch_loop: Any, fit_loop: Any, live: LiveTraining, has_tables: bool) -> None:
    """Continue after a rollback of tables, and agree on `should_stop`, at the three places where the loops may end."""
    tables = live.tables
    for loop, name, place, continue_after_rollback in (
        (epoch_loop, "advance", "batch", tables.again_if_rolled_back),
        (epoch_loop, "on_advance_end", "validation", tables.end_batch),
        (fit_loop, "on_advance_end", "epoch", tables.end_epoch),
    ):
        agreeing = partial(_run_then_agree, live, place)
        surround(loop, name, partial(agreeing, continue_after_rollback) if has_tables else agreeing)


def _run_then_agree(live: LiveTraining, place: str, run: Method, *args: Any) -> None:
    run(*args)
    live.votes.agree_on_stop(place)


def _decided_by_rank_zero(strategy: LiveStrategy, is_due: Method, fetcher: Any) -> bool:
    """Return rank 0's answer: each worker reads its own clock, and one that validates would wait for one that does not."""
    answer: bool = strategy.broadcast(is_due(fetcher))
    return answer


def _send_no_sigterm() -> None:
    """Do nothing. Lightning broadcasts after each batch whether rank 0 has received SIGTERM. It hangs if another rank has."""


def _run_timed(strategy: LiveStrategy, live: LiveTraining | None, run: Method, *args: Any) -> Any:
    own = strategy.clock.read()
    try:
        with strategy.times.measure("optimizer"):
            return run(*args)
    finally:
        if live is not None:
            live.batch_done(own)


# Replace the data loaders that Lightning hands to the strategy by loaders that split their batches over the workers.


@dataclass(frozen=True)
class JobPeers:
    """The workers of a live job, see `order.Peers`."""

    _strategy: LiveStrategy
    _live: LiveTraining

    @property
    def place(self) -> tuple[int, int]:
        return self._strategy.own_place

    @property
    def speeds(self) -> tuple[int, ...]:
        return self._live.position.speeds

    @property
    def owned_sockets(self) -> Sequence[tuple[int, int]]:
        return self._live.world.owned_sockets

    def of_rank_zero(self, mine: T) -> T:
        found: T = self._strategy.broadcast(mine, 0)
        return found


@dataclass(eq=False)
class UsersLoaders:
    """The loaders of a strategy's Trainers. The first fields are arguments of the strategy."""

    _global_batch_size: int | None
    _max_catch_up_s: float = 60.0
    _compare_data: bool = True
    _are_split_by_user: bool | None = None  # whether the Trainer was made with `use_distributed_sampler=False`

    def keep_samplers(self, trainer: Any) -> None:
        """Keep Lightning from replacing samplers: its own shuffles every training loader, even where the user does not."""
        connector = trainer._accelerator_connector
        if self._are_split_by_user is None:
            self._are_split_by_user = not connector.use_distributed_sampler
        # Lightning splits predictions itself, because it needs their indices.
        connector.use_distributed_sampler = trainer.state.fn == TrainerFn.PREDICTING and not self._are_split_by_user

    def replaced(self, dataloader: object, trainer: Any, job: JobSession | None, strategy: LiveStrategy) -> object:
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
            takes = submodule(package_of(trainer), "utilities.signature_utils").is_param_in_hook_signature
            check_step_signature(training and takes(trainer.lightning_module.training_step, "dataloader_iter", explicit=True))
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
                iterable=settings_for(trainer, training, global_batch, self._max_catch_up_s, self._compare_data),
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
            f"{data.source!r:.120} never ends, and a loader for validation, test or prediction has to: give its "
            "source a place to stop, such as kafka(..., stop='latest')"
        )
    limit = trainer.limit_train_batches
    is_limited = (isinstance(limit, int) or limit != 1.0) and not trainer.fast_dev_run
    if is_limited or trainer.overfit_batches:
        raise UnsupportedLoaderError(
            f"limit_train_batches={limit} and overfit_batches={trainer.overfit_batches} would leave rows "
            f"of each window of {data.source!r:.120} out forever: set the length of an epoch with kafka(..., window_rows=...)"
        )
    if isinstance(dataloader, DataLoader) and batching_of(dataloader).drop_last:
        raise UnsupportedLoaderError(
            f"drop_last=True would leave the last rows of each window of {data.source!r:.120} out forever, and end training "
            "at a window smaller than a batch: leave it out, a smaller last batch is weighted by its rows"
        )
    data.set_epoch(trainer.current_epoch)
