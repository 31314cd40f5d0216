"""Scripts with workers that meet in different collectives, each in another way, for `test_mismatches.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverStrategy
from lightning_dlrover.rdzv import desync
from lightning_dlrover.rdzv.desync import MismatchError
from tests.e2e.toy_job import SEED, Recorder, Rows, ToyModel, make_trainer

STEP = 5
"""Batch at which the last rank does something else than the others."""

CHECK_INTERVAL_S = 0.03


@dataclass(frozen=True)
class Way:
    """How the workers of a job come to different places."""

    name: str
    num_rows: int = 400
    num_val_rows: int = 0
    breaks: bool = False  # the round breaks for the last rank before it knows that all want to stop


class Deviating(ToyModel):
    """Trains like the others until the last rank deviates."""

    way = ""

    @property
    def is_odd(self) -> bool:
        """Whether this worker is the one that deviates, now."""
        is_it: bool = self.trainer.global_rank == self.trainer.world_size - 1 and self.trainer.world_size > 1
        if is_it:
            self.recorder.write("deviates")
        return is_it

    @property
    def strategy(self) -> Any:
        return self.trainer.strategy

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == STEP:
            act: Callable[[Tensor], Tensor] = getattr(self, f"step_{self.way}", lambda loss: loss)
            return act(loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == STEP:
            act: Callable[[], object] = getattr(self, f"end_{self.way}", lambda: None)
            act()

    # --- inside of a step -----------------------------------------------------------------------------------------------

    def step_barrier_alone(self, loss: Tensor) -> Tensor:
        if self.is_odd:
            self.strategy.barrier("alone")
        return loss

    def step_raw_against_gradients(self, loss: Tensor) -> Tensor:
        if self.is_odd:
            dist.all_reduce(torch.ones(3))
        return loss

    def step_gather_in_step(self, loss: Tensor) -> Tensor:
        if self.is_odd:
            self.all_gather(loss)
        return loss

    def step_no_sync(self, loss: Tensor) -> Tensor:
        if self.is_odd:
            self.strategy.model.require_backward_grad_sync = False
        return loss

    def on_after_backward(self) -> None:
        self.strategy.model.require_backward_grad_sync = True

    def step_stop_iteration(self, loss: Tensor) -> Tensor:
        if self.is_odd:
            raise StopIteration
        return loss

    # --- between two steps ----------------------------------------------------------------------------------------------

    def end_broadcast_or_reduce(self) -> None:
        if self.is_odd:
            self.strategy.reduce(torch.ones(1))
        else:
            self.strategy.broadcast(1)

    def end_barrier_names(self) -> None:
        self.strategy.barrier("odd" if self.is_odd else "even")

    def end_reduce_lines(self) -> None:
        if self.is_odd:
            self.strategy.reduce(torch.ones(1))
        else:
            self.strategy.reduce(torch.zeros(1))

    def end_checkpoint_alone(self) -> None:
        if self.is_odd:
            self.trainer.save_checkpoint(f"{self.recorder.place.folder}/alone.ckpt")

    def end_raw_or_ours(self) -> None:
        if self.is_odd:
            dist.all_reduce(torch.ones(1))
        else:
            self.strategy.reduce(torch.ones(1))

    def end_raw_sizes(self) -> None:
        dist.all_reduce(torch.ones(1000 if self.is_odd else 1))

    def end_torchmetrics(self) -> None:
        from torchmetrics import MeanMetric

        metric = MeanMetric()
        metric.update(1.0)
        if self.is_odd:
            metric.compute()

    def end_validation(self) -> None:
        # Seen after this hook: should a validation be run now?
        if self.is_odd:
            self.trainer.val_check_batch = STEP + 1

    def end_async_sizes(self) -> None:
        dist.all_reduce(torch.ones(2 if self.is_odd else 1), async_op=True).wait()

    def end_async_alone(self) -> None:
        if self.is_odd:
            dist.all_reduce(torch.ones(1), async_op=True).wait()

    def end_gather_shapes(self) -> None:
        self.all_gather(torch.ones(3 if self.is_odd else 2))


# --- correct operations -------------------------------------------------------------------------------------------------------


def operations(rank: int, size: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Operations of `torch.distributed` on the default group, for three workers; what each worker does differs legally."""
    ones, ranks = torch.ones(3), range(size)

    def places() -> list[Tensor]:
        return [torch.zeros(3) for _ in ranks]

    def exchange_in_a_ring() -> None:
        to, source = (rank + 1) % size, (rank - 1) % size
        messages = [dist.P2POp(dist.isend, ones, to), dist.P2POp(dist.irecv, torch.zeros(3), source)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    def collect_from_anyone() -> None:
        if rank == 0:
            assert sorted(dist.recv(torch.zeros(1)) for _ in ranks[1:]) == [*ranks[1:]]
        else:
            dist.send(torch.ones(1), 0)

    def send_objects() -> None:
        found: list[object] = [None]
        if rank == 0:
            dist.send_object_list(["a"], 1)
        elif rank == 1:
            dist.recv_object_list(found, 0)
            assert found == ["a"]

    def scatter_objects() -> None:
        found: list[object] = [None]
        dist.scatter_object_list(found, ["x" * i for i in ranks] if rank == 1 else None, src=1)
        assert found == ["x" * rank]

    def gather_all_objects() -> None:
        found = [None] * size
        dist.all_gather_object(found, "x" * rank)
        assert [len(each or "") for each in found] == [*ranks]

    def exchange_with_splits() -> None:
        received = torch.zeros(sum(i + 1 for i in ranks))
        dist.all_to_all_single(received, torch.ones((rank + 1) * size), [i + 1 for i in ranks], [rank + 1] * size)
        assert received.sum() == len(received)

    def reduce_async_on_one() -> None:
        work = dist.all_reduce(total := ones.clone(), async_op=rank == 1)
        if work is not None:
            work.wait()
        assert total[0] == size

    def begin_several_at_once() -> None:
        # All are begun before the first one is waited for, as in overlapped communication.
        works = [dist.all_reduce(ones.clone(), async_op=True) for _ in range(20)]
        dist.barrier()
        for work in works:
            work.wait()

    def pass_around() -> None:
        for i in ranks[:-1]:
            if rank == i:
                dist.send(ones, i + 1)
            elif rank == i + 1:
                dist.recv(torch.zeros(3), i)

    yield "monitored_barrier", dist.monitored_barrier
    yield "send", pass_around
    yield "batch_isend_irecv", exchange_in_a_ring
    yield "recv from anyone", collect_from_anyone
    yield "monitored_barrier of all", lambda: dist.monitored_barrier(wait_all_ranks=True)
    yield "send_object_list", send_objects
    yield "gather", lambda: dist.gather(ones, places() if rank == 2 else None, 2)
    yield "gather_object", lambda: dist.gather_object("x" * rank, [None] * size if rank == 0 else None)
    yield "all_gather_object", gather_all_objects
    yield "scatter", lambda: dist.scatter(torch.zeros(3), places() if rank == 1 else None, 1)
    yield "scatter_object_list", scatter_objects
    yield "broadcast_object_list", lambda: dist.broadcast_object_list(["x" * 100 if rank == 1 else None], 1)
    yield "reduce", lambda: dist.reduce(ones.clone(), 1)
    yield "reduce_scatter", lambda: dist.reduce_scatter(torch.zeros(rank + 1), [torch.zeros(i + 1) for i in ranks])
    yield "reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(3 * size))
    yield "all_to_all", lambda: dist.all_to_all(places(), places())
    yield "all_to_all_single", exchange_with_splits
    yield "all_gather", lambda: dist.all_gather(places(), ones)
    yield "all_gather_into_tensor", lambda: dist.all_gather_into_tensor(torch.zeros(3 * size), ones)
    yield "broadcast", lambda: dist.broadcast(ones.clone(), 2)
    yield "all_reduce_coalesced", lambda: dist.all_reduce_coalesced([ones.clone(), ones.clone()])
    yield "all_reduce, asynchronous on one worker", reduce_async_on_one
    yield "all_reduce, several at once", begin_several_at_once
    yield "barrier", dist.barrier


class Communicating(ToyModel):
    """Runs all operations, each with another worker that comes late, in a hook."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx != STEP:
            return
        size = self.trainer.world_size
        for late in range(size):
            for name, run in operations(self.trainer.global_rank, size):
                if late == self.trainer.global_rank:
                    time.sleep(5 * desync.QUIET_S)  # the others publish what they wait for
                run()
                self.recorder.write("ran", name=name)


def train_correctly(recorder: Recorder, way: Way) -> None:
    """Workers with watchers that look often, and so often see old counts of each other."""
    desync.TICK_S, desync.QUIET_S = 0.002, 0.005
    _fit(Communicating(recorder, 0.01), way, epochs=1)


def _fit(model: ToyModel, way: Way, epochs: int) -> None:
    L.seed_everything(SEED, verbose=False)
    trainer = make_trainer(
        model.recorder.place.folder,
        strategy=DLRoverStrategy(global_batch_size=8, check_interval_s=CHECK_INTERVAL_S),
        max_epochs=epochs,
        limit_val_batches=None if way.num_val_rows else 0,
    )
    val_loader = DataLoader(Rows(way.num_val_rows), 8) if way.num_val_rows else None
    trainer.fit(model, DataLoader(Rows(way.num_rows), 8), val_loader)
    model.recorder.write("after_fit", step=trainer.global_step)


# --- decisions of one worker --------------------------------------------------------------------------------------------------


class Stopping(ToyModel):
    """Asks to stop after a batch or an epoch, on all workers or on the last one."""

    who = hook = ""
    breaks = False

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.hook == "batch" and self.trainer.global_step == STOP_STEP:
            self._ask()

    def on_train_epoch_end(self) -> None:
        if self.hook == "epoch" and self.trainer.current_epoch == 0:
            self._ask()

    def _ask(self) -> None:
        if self.who == "all" or self.trainer.global_rank == self.trainer.world_size - 1:
            self.recorder.write("asks", step=self.trainer.global_step)
            self.trainer.should_stop = True
            if self.breaks and self.trainer.global_rank == self.trainer.world_size - 1:
                self._break_round_at_place()

    def _break_round_at_place(self) -> None:
        assert self.live is not None
        world = self.live.world
        all_reach = world.all_reach

        def arrive_and_break(place: str, timeout_s: float | None = None) -> bool:
            assert all_reach(place, timeout_s)  # so all have come, and the others go on
            world.all_reach = all_reach  # type: ignore[method-assign]
            assert world.formation is not None
            world._sockets.sever(world.formation.round.number)
            return all_reach(place, timeout_s)

        world.all_reach = arrive_and_break  # type: ignore[method-assign]


STOP_STEP = 7


def train_to_stop(recorder: Recorder, way: Way) -> None:
    """Workers that stop early."""
    model = Stopping(recorder, 0.01)
    model.who, _, model.hook = way.name.partition("_")
    model.breaks = way.breaks
    _fit(model, way, epochs=100)


class Severed(ToyModel):
    """Loses its connections between the backward pass and the update, as when a reduction is aborted."""

    severed_in = 0  # attempt at the step

    def on_after_backward(self) -> None:
        assert self.live is not None
        if self.trainer.global_step == STEP and self.trainer.global_rank == 0 and not self.severed_in:
            assert self.live.formation is not None
            self.severed_in = self.live.formation.round.number
            self.live.world._sockets.sever(self.severed_in)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.recorder.write("updates", **self.where(), step=self.trainer.global_step)


def train_severed(recorder: Recorder, way: Way) -> None:
    """A worker with reductions that are aborted once."""
    _fit(Severed(recorder, 0.01), way, epochs=1)


def train_to_mismatch(recorder: Recorder, way: Way) -> None:
    """The script."""
    model = Deviating(recorder, 0.01)
    model.way = way.name
    try:
        _fit(model, way, epochs=2)
    except MismatchError as error:
        recorder.write("mismatch", text=str(error))
        raise
