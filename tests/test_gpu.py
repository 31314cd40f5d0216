"""Effects of a GPU: results that arrive late, and state that belongs on the device. The CPU runs the same tests."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_dlrover.live.lightning_adapter import in_ddp_on_this_stream
from lightning_dlrover.live.metrics import restore_partial
from lightning_dlrover.live.order import FitPosition
from lightning_dlrover.live.recovery import ResilientCollectives, Update, apply, capture
from lightning_dlrover.live.replica import LiveStrategy
from lightning_dlrover.live.state import seed_for
from lightning_dlrover.live.wiring import Collectives
from lightning_dlrover.rdzv.desync import CollectiveCall, CollectiveMonitor, OutsideOfLoops, shown
from lightning_dlrover.rdzv.membership.member import WorldError
from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.rdzv.transport.process_groups import wait_for_device

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

each_device = pytest.mark.parametrize("device", DEVICES)


class AbortedWorld:
    """A world that loses its round while a collective is on the stream."""

    broken = False
    is_asynchronous = True
    worker_id = "a"

    def wait_for_device(self, device: torch.device) -> None:
        if torch.cuda.is_available():
            wait_for_device(device)

    def broken_error(self) -> WorldError:
        return WorldError("the round has ended")

    def is_failure(self, error: BaseException) -> bool:
        return self.broken and isinstance(error, WorldError)

    def is_recoverable(self, error: BaseException, is_in_step: bool) -> bool:
        return self.is_failure(error)


@pytest.fixture
def world() -> Any:
    return AbortedWorld()


@pytest.fixture
def collectives(world: Any) -> ResilientCollectives:
    """Those of one of two workers on a GPU. Without a GPU, on a device that has computed everything at once."""
    formation: Any = SimpleNamespace(size=2, rank=0)

    class Survivors:
        def meet_survivors(self) -> bool:
            world.broken = False
            return False

    trainer: Any = SimpleNamespace(device=torch.device("cuda"))
    return ResilientCollectives(world, FitPosition(formation, has_entered=True), trainer, Survivors())


# --- aborted collectives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", DEVICES)
def test_gradients_of_an_ended_round_are_refused(machine: str, collectives: ResilientCollectives, world: Any) -> None:
    collectives.check_gradients()
    world.broken = True
    with pytest.raises(WorldError, match="the round has ended"):
        collectives.check_gradients()


@pytest.mark.parametrize("machine", DEVICES)
def test_reduction_cut_short_by_an_abort_is_done_again(machine: str, collectives: ResilientCollectives, world: Any) -> None:
    values: list[float] = []

    def reduce() -> float:
        values.append(len(values))
        world.broken = len(values) == 1  # no error: the stream continues after an abort
        return values[-1]

    assert collectives.run(reduce) == 1
    assert values == [0, 1]


@each_device
def test_result_of_another_worker_comes_to_the_own_device(device: str) -> None:
    collectives = Collectives(None, cast(LiveStrategy, None))
    received = transfer.loads(transfer.dumps(torch.ones(2, device=device)))
    assert received.device.type == "cpu"
    collectives.confirmed = lambda *args, **kwargs: received  # type: ignore[method-assign]
    own = torch.zeros(2, device=device)
    assert collectives.reduce(lambda *args: None, own, None, "mean").device == own.device
    assert collectives.all_gather(lambda *args: own, own, None, False).device == own.device


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_logged_value_that_was_kept_returns_to_its_device(device: str) -> None:
    metric = SimpleNamespace(
        is_tensor=True,
        value=torch.zeros((), device=device),
        cumulated_batch_size=torch.zeros((), device=device),
        meta=SimpleNamespace(is_mean_reduction=True),
        reset=lambda: None,
    )
    kept = transfer.loads(transfer.dumps((torch.ones(()), torch.ones(()))))
    restore_partial({"loss": metric}, nn.Identity(), {"logged": {"loss": kept}, "states": {}})
    assert {metric.value.device.type, metric.cumulated_batch_size.device.type} == {device}


# --- state --------------------------------------------------------------------------------------------------------------------


def worker(device: str) -> tuple[Any, nn.Module, torch.optim.Optimizer, Any]:
    """One worker's part of mixed precision with Adam."""
    module = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.Adam(module.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
    progress = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    trainer = SimpleNamespace(
        lightning_module=module,
        optimizers=[optimizer],
        precision_plugin=MixedPrecision("16-mixed", device, scaler),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(manual_optimization=SimpleNamespace(optim_step_progress=progress))),
    )
    return trainer, module, optimizer, scaler


def make_update(module: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, device: str, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    scaler.scale(module(torch.ones(2, 64, device=device)).mean() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


@each_device
def test_missed_update_brings_state_and_scale_to_the_own_device(device: str) -> None:
    source, ahead, its_optimizer, its_scaler = worker(device)
    target, behind, optimizer, scaler = worker(device)
    make_update(behind, optimizer, scaler, device)
    for factor in (float("inf"), 1.0):  # overflowing gradients halve the scale
        make_update(ahead, its_optimizer, its_scaler, device, factor)
    assert its_scaler.state_dict() != scaler.state_dict()
    apply(target, Update(**transfer.loads(transfer.dumps(vars(capture(source))))))
    assert its_scaler.state_dict() == scaler.state_dict()
    assert {value.device.type for value in optimizer.state[behind.get_parameter("weight")].values() if value.dim()} == {device}
    for module, its, own in ((ahead, its_optimizer, its_scaler), (behind, optimizer, scaler)):
        make_update(module, its, own, device)
    assert behind.weight.device.type == device
    assert torch.equal(ahead.weight, behind.weight)  # type: ignore[arg-type]
    assert its_scaler.get_scale() == scaler.get_scale()


@each_device
def test_seed_of_the_job_rules_the_device(device: str) -> None:
    def draw(place: tuple[int, int]) -> list[float]:
        torch.rand(3, device=device)
        seed_for(7, place)
        return torch.rand(3, device=device).tolist()

    assert draw((5, 0)) == draw((5, 0))
    assert draw((5, 0)) != draw((5, 1))
    assert draw((5, 0)) != draw((6, 0))


# --- streams ------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_gradients_are_accumulated_on_the_stream_of_the_step() -> None:
    """DDP keeps the nodes that accumulate gradients, on the stream on which it was made."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    strategy: Any = SimpleNamespace(determine_ddp_device_ids=lambda: [0], _ddp_kwargs={"init_sync": False})
    module = nn.Linear(64, 64).cuda()
    torch.set_warn_always(True)  # else torch warns once in a process
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*AccumulateGrad node's stream")
            for _ in range(2):  # two rounds
                replica = in_ddp_on_this_stream(strategy, module)
                replica(torch.ones(2, 64, device="cuda")).mean().backward()
                del replica  # it keeps the nodes
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # as Lightning does: the test sees what it looks for
                replica = in_ddp_on_this_stream(strategy, module)
            with pytest.raises(UserWarning, match="AccumulateGrad node's stream"):
                replica(torch.ones(2, 64, device="cuda")).mean().backward()
    finally:
        torch.set_warn_always(False)
        dist.destroy_process_group()


# --- votes --------------------------------------------------------------------------------------------------------------------


@each_device
def test_vote_does_not_wait_for_the_stream(device: str) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    is_busy: Callable[[], bool] = lambda: True  # noqa: E731
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # cycles: two seconds or more
        end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        end.record()
        is_busy = lambda: not end.query()  # type: ignore[no-untyped-call]  # noqa: E731

    def vote(rank: int) -> list[int]:
        group = dist.ProcessGroupGloo(store, rank, 2)  # type: ignore[call-arg]
        monitor = CollectiveMonitor(
            group,
            rank,
            2,
            16,
            lambda: 0,
            lambda: None,
            cast(Any, SimpleNamespace(place=OutsideOfLoops(is_computing=True))),
            lambda: None,
        )
        try:
            call = CollectiveCall("the vote between two steps", "step 1", shown(sys._getframe()))
            ballot = [5 + rank, -rank]
            return monitor.counted(monitor.vote(call, ballot), ballot)
        finally:
            monitor.close()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(vote, (0, 1), timeout=60)) == [[5, -1]] * 2
    assert is_busy()
