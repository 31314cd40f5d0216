"""Waits for a device whose collectives another worker never completes."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lightning_dlrover.rdzv.transport.process_groups import DeviceWait


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
