"""The choice of the state's sender and receivers, the workers' votes, and equal models. Real loops: tests/e2e."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dlrover.rdzv.group.loop import Step, _Loop, handover, model_fingerprint, updates_made
from lightning_dlrover.rdzv.job.events import Event
from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.membership.member import Formation, RoundEndedError, WorldError
from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.rdzv.transport.process_groups import traits_of, wait_for_device
from lightning_dlrover.rdzv.transport.transfer import HostStateCache

# --- owners of the state ------------------------------------------------------------------------------------------------------

WORKERS = ["a", "b", "c", "d"]


@pytest.mark.parametrize("made", list(product([None, 6, 7], repeat=4)))
def test_all_get_the_most_advanced_state_from_one_of_its_holders(made: tuple[int | None, ...]) -> None:
    updates = dict(zip(WORKERS, made, strict=True))
    newest = max((u for u in made if u is not None), default=0)
    has_newest = {w for w in WORKERS if updates[w] == newest} or {WORKERS[0]}
    plan = handover(WORKERS, updates)
    for sender, receiver in (*plan.behind, *plan.joining):
        assert sender in has_newest
        assert receiver not in has_newest
        has_newest.add(receiver)
    assert has_newest == set(WORKERS)
    assert {w for _, w in plan.behind} == {w for w in WORKERS if updates[w] is not None and updates[w] != newest}


def test_joiners_are_given_the_state_by_as_many_others_as_there_are() -> None:
    plan = handover(WORKERS, {"a": 5, "b": 5, "c": None, "d": None})
    assert plan.joining == [("a", "c"), ("b", "d")]


def test_hello_that_is_not_a_number_ends_the_round() -> None:
    round_ = RoundRecord(3, ["a", "b"], "", "start", planned=True)
    assert updates_made(Formation(round_, {"a": b"7", "b": b""}, 0)) == {"a": 7, "b": None}
    with pytest.raises(RoundEndedError, match=r"round 3.*garbage"):
        updates_made(Formation(round_, {"a": b"7", "b": b"garbage"}, 0))


# --- states left in a host's memory ------------------------------------------------------------------------------------------


class WorldWithLeftState:
    """A world of one worker. Its agent has replaced its workers."""

    worker_id = "a"
    backend = "gloo"
    formation = Formation(RoundRecord(1, ["a"], "", "start", planned=True), {"a": b""}, 0)

    def __init__(self, folder: Path) -> None:
        self.left_state = HostStateCache(folder)
        self.events: list[str] = []

    def is_failure(self, error: BaseException) -> bool:
        return isinstance(error, RoundEndedError)

    def is_recoverable(self, error: BaseException, is_in_step: bool) -> bool:
        return self.is_failure(error)

    def event(self, event: Event, text: str) -> None:
        self.events.append(text)


class Part:
    def __init__(self, error: Exception | None = None) -> None:
        self.loaded: dict[str, Any] = {}
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        return {"value": 5}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._error is not None:
            raise self._error
        self.loaded = state_dict


def loop_after(folder: Path, part: Part) -> tuple[_Loop, Any]:
    """A loop whose agent's former workers left the state of step 7."""
    world: Any = WorldWithLeftState(folder)
    world.left_state.write(7, transfer.pack({"num_made": 7, "num_steps": 9, "state": {"part": part.state_dict()}}))
    return _Loop(world, 9, 0, {"part": part}, 0.1), world


def test_loop_continues_from_the_left_state(tmp_path: Path) -> None:
    part = Part()
    loop, world = loop_after(tmp_path, part)
    loop._settle()
    assert (loop.num_made, part.loaded) == (7, {"value": 5})
    assert world.events == ["continued from the state of step 7 in a host's memory"]


@pytest.mark.parametrize("error, is_kept", [(KeyError("weight"), False), (RoundEndedError("a worker was lost"), True)])
def test_left_state_that_cannot_be_loaded_ends_no_second_group(error: Exception, is_kept: bool, tmp_path: Path) -> None:
    loop, world = loop_after(tmp_path, Part(error))
    with pytest.raises(type(error)):
        loop._settle()
    assert world.left_state.step() == (7 if is_kept else None)


# --- models -------------------------------------------------------------------------------------------------------------------


def model(width: int = 4, **more: nn.Module) -> nn.Module:
    return nn.ModuleDict({"first": nn.Linear(3, width), "norm": nn.BatchNorm1d(width), **more})


def test_models_of_one_script_share_a_fingerprint() -> None:
    torch.manual_seed(1)
    one = model()
    torch.manual_seed(2)
    assert model_fingerprint(one) == model_fingerprint(model())


@pytest.mark.parametrize("other", [model(5), model(more=nn.Linear(1, 1)), model().double(), nn.Linear(3, 4)])
def test_another_shape_name_or_type_is_another_fingerprint(other: nn.Module) -> None:
    assert model_fingerprint(other) != model_fingerprint(model())


# --- aborted reductions -------------------------------------------------------------------------------------------------------

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class AbortedWorld:
    """A world of two workers that loses its round in the middle of a step. Waits succeed, like those of a stream."""

    def __init__(self, backend: str) -> None:
        self.is_asynchronous = traits_of(backend).is_asynchronous
        self.broken = False
        self.formation = Formation(RoundRecord(1, ["a", "b"], "", "start", planned=True), {}, 0)
        self.worker_id = "a"
        self.waits: list[str] = []

    def wait_for_device(self, device: torch.device) -> None:
        self.waits.append(device.type)
        wait_for_device(device)

    def broken_error(self) -> WorldError:
        return WorldError("the round has ended")

    def is_failure(self, error: BaseException) -> bool:
        return self.broken and isinstance(error, WorldError)

    def is_recoverable(self, error: BaseException, is_in_step: bool) -> bool:
        return self.is_failure(error)


class OneStepLoop(_Loop):
    """A loop that has entered its job, and ends instead of forming the next round."""

    def _enter(self) -> None:
        self._has_state = True

    def _recover(self) -> None:
        raise StopIteration


def attempt_step(backend: str, device: str, is_aborted: bool) -> tuple[Step, float]:
    """Run one step of a loop; return it and its change of the weight."""
    world: Any = AbortedWorld(backend)
    weight = torch.ones(1000, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    loop = OneStepLoop(world, 2, 0, {}, 0.1).run()
    step = next(loop)
    with step:
        weight.sum().backward()  # type: ignore[no-untyped-call]
        world.broken = is_aborted
        optimizer.step()
    loop.close()  # type: ignore[attr-defined]
    optimizer.step()  # allowed, because this step is outside the loop
    return step, float(weight.detach().cpu()[0])


@pytest.mark.parametrize("device", DEVICES)
def test_aborted_reduction_is_followed_by_no_update(device: str) -> None:
    step, weight = attempt_step("cpu:gloo,cuda:nccl", device, is_aborted=True)
    assert not step.was_made
    assert weight == pytest.approx(0.9)  # changed by the step outside


@pytest.mark.parametrize("backend, is_made", [("cpu:gloo,cuda:nccl", False), ("gloo", True)])
def test_step_without_an_optimizer_can_confirm_its_results(backend: str, is_made: bool) -> None:
    world: Any = AbortedWorld(backend)
    loop = OneStepLoop(world, 2, 0, {}, 0.1).run()
    step = next(loop)
    changed = False
    with step:
        world.broken = True
        step.confirm(torch.ones(1))
        changed = True
    loop.close()  # type: ignore[attr-defined]
    assert (step.was_made, changed) == (is_made, is_made)


@pytest.mark.parametrize("backend, is_aborted", [("cpu:gloo,cuda:nccl", False), ("gloo", True)])
def test_whole_gradients_are_applied(backend: str, is_aborted: bool) -> None:
    step, weight = attempt_step(backend, "cpu", is_aborted)  # gloo's results are complete unless it raises
    assert step.was_made
    assert weight == pytest.approx(0.8)


def test_workers_part_only_after_their_devices_have_the_results_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = AbortedWorld("cpu:gloo,cuda:nccl")
    world.finish = lambda num_steps: world.waits.append("finished")
    monkeypatch.setattr(transfer, "barrier", lambda: world.waits.append("barrier"))
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    for step in OneStepLoop(world, 1, 0, {}, 0.1).run():
        with step:
            optimizer.step()
            world.waits.append("collective")  # its result is not used in the step
    assert world.waits == ["cpu", "collective", "cpu", "barrier", "finished"]
