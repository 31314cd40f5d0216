"""The stand-in for NCCL follows its rules. Members are threads of this process, except where a process must end."""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it, which takes seconds: not in each of the processes
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.rdzv.transport.torch_names import HashStore, TCPStore
from tests.support import nccl_stand_in
from tests.support.nccl_stand_in import Quirks, StandIn, Stream
from tests.support.waiting import eventually

REMOTE_ERROR = "ncclRemoteError: A call failed possibly due to a network error"
CPU = torch.device("cpu")

Members = list[StandIn]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Members]]:
    """Make the members of a group. The group is aborted with the test."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    monkeypatch.setattr(torch.cpu, "synchronize", torch.cpu.synchronize)
    made: Members = []

    def make(size: int, **quirks: Any) -> Members:
        nccl_stand_in.install(Quirks(**quirks))
        store = HashStore()
        members = [StandIn(store, rank, size, timedelta(seconds=5)) for rank in range(size)]
        made.extend(members)
        return members

    yield make
    monkeypatch.delenv("TORCH_NCCL_USE_COMM_NONBLOCKING", raising=False)
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "0")
    nccl_stand_in.install(Quirks())
    for member in made:
        member.abort()


def on_all(members: Members, run: Callable[[StandIn], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(run, members))


def beside(run: Callable[[], Any]) -> Future[Any]:
    """Run what may wait for ever."""
    done: Future[Any] = Future()

    def work() -> None:
        try:
            done.set_result(run())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return done


def reduced(member: StandIn, value: float = 1.0) -> Tensor:
    tensor = torch.full((3,), value)
    member.allreduce([tensor]).wait()
    return tensor


def die(member: StandIn) -> None:
    """Close a member's connections, as the end of its process does."""
    assert member._current is not None
    member._current._close()


def connected(world: Callable[..., Members], size: int, **quirks: Any) -> Members:
    members = world(size, **quirks)
    on_all(members, lambda member: member.eager_connect_single_device(CPU))
    return members


def noticed(member: StandIn) -> bool:
    return member._current is not None and bool(member._current._error)


# --- results ------------------------------------------------------------------------------------------------------------------


def use_all(member: StandIn) -> dict[str, list[float]]:
    rank, size = member.rank(), member.size()
    own = torch.tensor([float(rank), 10.0])
    found: dict[str, list[Tensor]] = {}
    options: Any

    def run(name: str, outputs: list[Tensor], *arguments: Any) -> None:
        getattr(member, name)(*arguments).wait()
        found[name] = outputs

    for name, operation in (("allreduce", dist.ReduceOp.MAX), ("allreduce_coalesced", dist.ReduceOp.AVG)):
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        run(name, [tensor := own.clone()], [tensor], options)
    options = dist.ReduceOptions()
    options.rootRank = 1
    run("reduce", [tensor := own.clone()], [tensor], options)
    options = dist.BroadcastOptions()
    options.rootRank = 1
    run("broadcast", [tensor := own.clone()], [tensor], options)
    outs = [torch.zeros(2) for _ in range(size)]
    run("allgather", outs, [outs], [own])
    run("all_gather_single", [out := torch.zeros(2 * size)], out, own)
    options = dist.GatherOptions()
    options.rootRank = 0
    outs = [torch.zeros(2) for _ in range(size)] if rank == 0 else []
    run("gather", outs, [outs] if rank == 0 else [], [own], options)
    options = dist.ScatterOptions()
    options.rootRank = 0
    run("scatter", [out := torch.zeros(2)], [out], [[own + i for i in range(size)]] if rank == 0 else [], options)
    run("reduce_scatter_single", [out := torch.zeros(2)], out, torch.arange(2.0 * size), dist.ReduceScatterOptions())
    run("alltoall", outs := [torch.zeros(2) for _ in range(size)], outs, [own + i for i in range(size)])
    run("all_to_all_single", [out := torch.zeros(size)], out, torch.arange(float(size)) + 10 * rank, [], [])
    run("barrier", [])
    run("send", [], [own], (rank + 1) % size, 0)
    run("recv", [out := torch.zeros(2)], [out], (rank - 1) % size, 0)
    return {name: torch.cat(outputs).tolist() if outputs else [] for name, outputs in found.items()}


@pytest.mark.parametrize("is_late", [False, True])
def test_collectives_give_what_torch_documents(world: Callable[..., Members], is_late: bool) -> None:
    first, second = on_all(world(2, is_late=is_late), use_all)
    assert first == {
        "allreduce": [1, 10],
        "allreduce_coalesced": [0.5, 10],
        "reduce": [0, 10],
        "broadcast": [1, 10],
        "allgather": [0, 10, 1, 10],
        "all_gather_single": [0, 10, 1, 10],
        "gather": [0, 10, 1, 10],
        "scatter": [0, 10],
        "reduce_scatter_single": [0, 2],
        "alltoall": [0, 10, 1, 10],
        "all_to_all_single": [0, 10],
        "barrier": [],
        "send": [],
        "recv": [1, 10],
    }
    assert second["reduce"] == [1, 20]
    assert second["scatter"] == [1, 11]
    assert second["reduce_scatter_single"] == [4, 6]
    assert second["alltoall"] == [1, 11, 2, 11]


def test_values_are_those_of_the_call_and_not_of_a_later_moment(world: Callable[..., Members]) -> None:
    first, second = connected(world, 2)
    tensor = torch.ones(3)
    work = first.allreduce([tensor])
    tensor.zero_()
    reduced(second)
    work.wait()
    assert tensor.tolist() == [2, 2, 2]


def test_a_future_in_late_mode_comes_before_the_result_and_the_device_has_it(world: Callable[..., Members]) -> None:
    first, second = connected(world, 2, is_late=True)
    tensors = [torch.ones(3), torch.ones(3)]
    futures = [member.allreduce([tensor]).get_future() for member, tensor in zip((first, second), tensors, strict=True)]
    time.sleep(0.1)
    assert all(future.done() for future in futures)
    assert torch.cat(tensors).tolist() == [1] * 6
    torch.cpu.synchronize()
    assert torch.cat(tensors).tolist() == [2] * 6


# --- creation -----------------------------------------------------------------------------------------------------------------


def test_communicator_is_made_in_the_first_collective_or_eagerly(world: Callable[..., Members]) -> None:
    members = world(2, create_s=0.2)
    began = time.monotonic()
    on_all(members, lambda member: member.eager_connect_single_device(CPU))
    assert time.monotonic() - began > 0.2
    began = time.monotonic()
    on_all(members, reduced)
    assert time.monotonic() - began < 0.2
    began = time.monotonic()
    on_all(world(2, create_s=0.2), reduced)
    assert time.monotonic() - began > 0.2


def test_cramped_device_has_room_for_one_communicator(world: Callable[..., Members]) -> None:
    connected(world, 1, cramped_rank=1)
    members = world(2, cramped_rank=1)
    created = [beside(lambda member=member: member.eager_connect_single_device(CPU)) for member in members]  # type: ignore[misc]
    created[0].result(5)
    with pytest.raises(dist.DistBackendError, match="ncclUnhandledCudaError"):
        created[1].result(5)


@pytest.mark.parametrize("is_nonblocking", [False, True])
def test_creation_waits_for_a_missing_member_up_to_the_limit_of_nonblocking_mode_which_holds_up_an_abort(
    world: Callable[..., Members], monkeypatch: pytest.MonkeyPatch, is_nonblocking: bool
) -> None:
    monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", str(int(is_nonblocking)))
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "0.6")
    first, _, _ = members = world(3)
    created = beside(lambda: on_all(members[:2], lambda member: member.eager_connect_single_device(CPU)))
    time.sleep(0.3)
    assert not created.done()
    aborted = beside(first.abort)
    time.sleep(0.1)
    assert aborted.done() != is_nonblocking
    if is_nonblocking:
        with pytest.raises(dist.DistBackendError, match="NCCL timeout"):
            created.result(2)
        aborted.result(2)
    else:
        time.sleep(0.6)
        assert not created.done()


def test_member_without_rank_0_fails_with_the_stores_timeout(world: Callable[..., Members]) -> None:
    _, second = world(2)
    second.store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(dist.DistBackendError, match="retrieving ncclUniqueId"):
        second.eager_connect_single_device(CPU)


# --- losses -------------------------------------------------------------------------------------------------------------------


def test_loss_shows_in_the_next_call_and_once_more_in_shutdown(world: Callable[..., Members]) -> None:
    first, second = connected(world, 2)
    die(second)
    eventually(lambda: noticed(first), "the condition", 5)
    for call in (lambda: reduced(first), first.shutdown):
        with pytest.raises(dist.DistBackendError, match=REMOTE_ERROR):
            call()


def test_collective_in_flight_waits_for_the_abort_after_a_loss_and_returns_garbage(world: Callable[..., Members]) -> None:
    first, second = connected(world, 2)
    waiting = beside(lambda: reduced(first))
    die(second)
    eventually(lambda: noticed(first), "the condition", 5)
    time.sleep(0.1)
    assert not waiting.done()
    first.abort()
    assert waiting.result(2).isnan().all()
    first.shutdown()
    with pytest.raises(dist.DistBackendError, match="NCCL communicator was aborted"):
        reduced(first)


def test_wait_raises_an_error_that_was_known_and_aborts(world: Callable[..., Members]) -> None:
    first, second = connected(world, 2)
    work = first.allreduce([torch.ones(1)])
    die(second)
    eventually(lambda: noticed(first), "the condition", 5)
    with pytest.raises(dist.DistBackendError, match=REMOTE_ERROR):
        work.wait()
    assert work.is_completed()


def test_loss_that_shows_as_a_hang_raises_nothing_until_the_abort(world: Callable[..., Members]) -> None:
    first, second = connected(world, 2, loss="hang")
    die(second)
    time.sleep(0.1)
    hanging = [beside(lambda: reduced(first)), beside(first.shutdown)]
    time.sleep(0.2)
    assert not any(each.done() for each in hanging)
    first.abort()
    assert hanging[0].result(2).isnan().all()
    hanging[1].result(2)


def test_some_losses_hang_and_some_raise(world: Callable[..., Members]) -> None:
    shown = set()
    for seed in range(8):
        first, _ = connected(world, 2, loss="either", seed=seed)
        assert first._current is not None
        shown.add(first._current._loss_shows)
    assert shown == {False, True}


def test_wait_with_a_timeout_aborts_the_communicator(world: Callable[..., Members]) -> None:
    first, _ = connected(world, 2)
    with pytest.raises(dist.DistBackendError, match="operation timeout"):
        first.allreduce([torch.ones(1)]).wait(timedelta(seconds=0.1))
    with pytest.raises(dist.DistBackendError, match="aborted"):
        reduced(first)


# --- the end of a group -------------------------------------------------------------------------------------------------------


def test_shutdown_waits_for_all_members(world: Callable[..., Members]) -> None:
    first, second = connected(world, 2)
    ending = beside(first.shutdown)
    time.sleep(0.2)
    assert not ending.done()
    second.shutdown()
    ending.result(2)


def test_abort_takes_its_time_and_collectives_end_within(world: Callable[..., Members]) -> None:
    first, _ = connected(world, 2, abort_s=0.4)
    waiting = beside(lambda: reduced(first))
    eventually(lambda: first._current is not None and bool(first._current._unfinished), "the condition", 5)
    aborting = beside(first.abort)
    time.sleep(0.1)
    assert not waiting.done()
    assert waiting.result(2).isnan().all()
    assert not aborting.done()
    aborting.result(2)


def test_abort_that_never_ends_raises_after_the_groups_timeout(world: Callable[..., Members]) -> None:
    first, _ = connected(world, 2, abort_s=float("inf"))
    first._timeout = timedelta(seconds=0.2)
    with pytest.raises(dist.DistBackendError, match="abort timed out"):
        first.abort()


def test_two_groups_on_a_device_for_one_collective_wait_for_each_other(world: Callable[..., Members]) -> None:
    groups = [connected(world, 2, is_one_at_a_time=is_one_at_a_time) for is_one_at_a_time in (False, False, True, True)]
    for _, member in groups:
        assert member._current is not None
        member._current._stream = Stream()  # rank 1 has another device
    for former, latter, is_stuck in ((groups[0], groups[1], False), (groups[2], groups[3], True)):
        first = beside(lambda: reduced(former[0]))  # noqa: B023
        time.sleep(0.05)
        second = beside(lambda: on_all(latter, reduced))  # noqa: B023
        time.sleep(0.2)
        assert second.done() != is_stuck
        assert not first.done()
        former[0].abort()
        second.result(2)


# --- under DDP, in processes --------------------------------------------------------------------------------------------------


def train(rank: int, size: int, port: int, quirks: Quirks, watchdog: str, waits: bool, sums: Any) -> None:
    faulthandler.disable()  # the watchdog ends a process as a crash does
    torch.set_num_threads(1)
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = watchdog
    nccl_stand_in.install(quirks)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("stand_in", store=store, rank=rank, world_size=size)
    assert dist.get_backend() == "stand_in"
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    replica = DistributedDataParallel(model, gradient_as_bucket_view=quirks.is_late)
    optimizer = torch.optim.SGD(replica.parameters(), 0.1)
    for step in itertools.count():
        optimizer.zero_grad()
        replica(torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
        if waits:
            torch.cpu.synchronize()
        optimizer.step()
        if sums is not None and step == 3:
            sums.put([p.sum().item() for p in model.parameters()])
            break
        if rank == 1 and step == 3:
            os._exit(0)
    dist.destroy_process_group()


def trained(
    quirks: Quirks, watchdog: str = "0", waits: bool = True, is_lost: bool = False
) -> tuple[list[int | None], list[Any]]:
    """Return the exit codes of two workers that train with DDP, and sums of their parameters."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    sums = None if is_lost else context.SimpleQueue()
    processes = [context.Process(target=train, args=(r, 2, store.port, quirks, watchdog, waits, sums)) for r in range(2)]
    for process in processes:
        process.start()
    try:
        found = [] if sums is None else [sums.get(), sums.get()]
        processes[1].join(20)
        processes[0].join(1 if is_lost else 20)
        return [process.exitcode for process in processes], found
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_replicas_agree_and_late_results_need_a_wait_for_the_device() -> None:
    codes, (first, second) = trained(Quirks())
    assert codes == [0, 0]
    assert first == second
    codes, late = trained(Quirks(is_late=True))
    assert codes == [0, 0]
    assert late == [first, first]
    _, (first, second) = trained(Quirks(is_late=True), waits=False)
    assert first != second


@pytest.mark.parametrize("watchdog, is_ended", [("1", True), ("0", False)])
def test_watchdog_ends_the_survivor_unless_it_is_switched_off(watchdog: str, is_ended: bool) -> None:
    codes, _ = trained(Quirks(), watchdog, is_lost=True)
    assert codes[1] == 0
    assert (codes[0] == -signal.SIGABRT) == is_ended  # otherwise it hangs, or its next call raises
