"""The end of a round's groups, and waits for a device: an abort that blocks, a shutdown that fails."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from lightning_dlrover.rdzv.transport import process_groups
from lightning_dlrover.rdzv.transport.process_groups import EXIT_STUCK, DeviceWait, GroupStuckError, RoundEnd
from tests.support.waiting import eventually


class Group:
    """A group that takes note of its calls, and holds them up."""

    def __init__(self, calls: list[str], error: Exception | None = None) -> None:
        self.calls = calls
        self.error = error
        self.may_abort, self.may_close = threading.Event(), threading.Event()
        self.may_abort.set()
        self.may_close.set()

    def abort(self) -> None:
        self.calls.append("abort")
        self.may_abort.wait(30)

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        self.may_close.wait(30)
        if self.error is not None:
            raise self.error


@pytest.fixture
def calls() -> list[str]:
    return []


def end_of(*groups: Any) -> RoundEnd:
    return RoundEnd(lambda: groups, "round 3", lambda error: None)


def test_groups_are_ended_once_however_many_threads_ask(calls: list[str]) -> None:
    end = end_of(Group(calls))
    threads = [threading.Thread(target=call) for call in (end.abort, end.close, end.abort)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end.wait(10)
    assert calls in (["abort"], ["shutdown"])


def test_abort_that_blocks_holds_up_only_those_who_wait_for_it(calls: list[str]) -> None:
    group = Group(calls)
    group.may_abort.clear()
    end = end_of(group)
    end.abort()
    with pytest.raises(GroupStuckError, match=r"round 3: .* its agent has to start it again"):
        end.wait(0.1)
    group.may_abort.set()
    end.wait(10)


def test_shutdown_with_an_error_is_followed_by_an_abort(calls: list[str]) -> None:
    end = end_of(Group(calls, RuntimeError("NCCL error: remote process exited")))
    end.close()
    end.wait(10)
    assert calls == ["shutdown", "abort"]


def test_shutdown_that_a_member_has_left_out_is_followed_by_an_abort(calls: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(process_groups, "CLOSE_S", 0.1)
    group = Group(calls)
    group.may_close.clear()
    end = end_of(group)
    end.close()
    eventually(lambda: "abort" in calls, "an abort", 10)
    group.may_close.set()
    end.wait(10)
    assert calls == ["shutdown", "abort"]


def test_worker_whose_abort_is_stuck_ends_with_a_reason(calls: list[str], monkeypatch: Any) -> None:
    codes: list[int] = []
    reported: list[BaseException] = []
    has_ended = threading.Event()
    monkeypatch.setattr(process_groups, "STUCK_S", 0.1)

    def end_process(code: int) -> None:
        codes.append(code)
        has_ended.set()

    monkeypatch.setattr(os, "_exit", end_process)
    group = Group(calls)
    group.may_abort.clear()
    RoundEnd(lambda: [group], "round 3", reported.append).abort()
    assert has_ended.wait(10)
    group.may_abort.set()
    assert codes == [EXIT_STUCK]
    assert "the device has not returned from the abort" in str(reported[0])


def test_error_of_one_abort_leaves_no_other_group_out(calls: list[str]) -> None:
    class Broken(Group):
        def abort(self) -> None:
            super().abort()
            raise RuntimeError("ProcessGroup abort timed out")

    end = end_of(Broken(calls), Group(calls))
    end.abort()
    end.wait(10)
    assert calls == ["abort", "abort"]


def test_groups_that_nobody_ends_hold_up_nobody(calls: list[str]) -> None:
    end_of(Group(calls)).wait(0.0)
    assert calls == []


def test_ended_groups_are_dropped_by_the_thread_that_ends_the_next_round(calls: list[str]) -> None:
    # The destructor of NCCL's group waits for a thread that needs the interpreter's lock.
    group = Group(calls)
    dropped_by: list[str] = []
    weakref.finalize(group, lambda: dropped_by.append(threading.current_thread().name))
    end = end_of(group)
    end.abort()
    end.wait(10)
    del end, group
    assert not dropped_by
    following = end_of(Group(calls))
    following.abort()
    following.wait(10)
    eventually(lambda: bool(dropped_by), "the groups of the round before to be dropped", 10)
    assert dropped_by == ["dlrover-end-round"]


def test_wait_that_lasts_too_long_ends_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    is_ended = threading.Event()
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: is_ended.wait(30))  # a stream that a collective holds up
    device_wait = DeviceWait(0.2, is_ended.set)
    began = time.monotonic()
    device_wait.wait(torch.device("cpu"))
    assert is_ended.is_set()
    assert 0.2 < time.monotonic() - began < 10
    device_wait.close()


def test_short_wait_ends_nothing_however_long_the_step_before_it() -> None:
    is_ended = threading.Event()
    device_wait = DeviceWait(0.2, is_ended.set)
    device_wait.wait(torch.device("cpu"))
    time.sleep(0.4)
    device_wait.wait(torch.device("cpu"))
    assert not is_ended.is_set()
    device_wait.close()
