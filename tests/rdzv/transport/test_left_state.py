"""The state that a group of workers leaves in its host's memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.rdzv.transport.transfer import HostStateCache, HostStateError


def state_of(step: int) -> dict[str, Any]:
    large = torch.arange(5000, dtype=torch.float32) + step
    return {
        "large": large,
        "again": [large],
        "view": large.view(50, 100).t(),
        "half": large.bfloat16(),
        "small": [step, "text"],
    }


def must_hold(left: HostStateCache, step: int) -> None:
    assert left.step() == step
    found, expected = left.read(), state_of(step)
    assert found["small"] == expected["small"]
    assert found["again"][0] is found["large"]
    for name in ("large", "view", "half"):
        assert torch.equal(found[name], expected[name])


def test_state_is_read_as_written_and_replaced_by_the_next(tmp_path: Path) -> None:
    left = HostStateCache(tmp_path)
    assert left.step() is None
    for step in (3, 4):
        num_bytes = left.write(step, transfer.pack(state_of(step)))
        must_hold(left, step)
        assert [file.stat().st_size for file in tmp_path.iterdir()] == [num_bytes]


def test_state_without_room_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = HostStateCache(tmp_path)
    left.write(3, transfer.pack(state_of(3)))
    packed = transfer.pack(state_of(4))

    def write(packed: transfer.Packed, file: Any) -> None:
        file.write(packed.body)
        file.flush()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transfer, "write", write)
    with pytest.raises(HostStateError, match=r"step 4 could not be kept.*No space left.*shm-size"):
        left.write(4, packed)
    assert [file.name for file in tmp_path.iterdir()] == ["state"]
    must_hold(left, 3)


def test_state_that_a_killed_worker_was_writing_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    others = [tmp_path / f"state.{pid}" for pid in (killed.pid, os.getppid())]  # the second process is alive
    for unfinished in others:
        unfinished.write_bytes(b"begun")
    HostStateCache(tmp_path).write(3, transfer.pack(state_of(3)))
    assert [unfinished.exists() for unfinished in others] == [False, True]
    must_hold(HostStateCache(tmp_path), 3)


def test_removed_state_is_not_there(tmp_path: Path) -> None:
    left = HostStateCache(tmp_path)
    left.write(3, transfer.pack(state_of(3)))
    for _ in range(2):
        left.remove()
        assert left.step() is None


@pytest.mark.parametrize("num_bytes", [0, 5, 20, 1000, 30000])
def test_damaged_state_is_an_error_not_a_crash(num_bytes: int, tmp_path: Path) -> None:
    left = HostStateCache(tmp_path)
    left.write(3, transfer.pack(state_of(3)))
    os.truncate(tmp_path / "state", num_bytes)
    assert left.step() in (None, 3)
    with pytest.raises(HostStateError, match="cannot be read"):
        left.read()


def test_vanished_folder_holds_no_state(tmp_path: Path) -> None:
    left = HostStateCache(tmp_path / "gone")
    assert left.step() is None
    with pytest.raises(HostStateError):
        left.read()
    with pytest.raises(HostStateError):
        left.write(1, transfer.pack({}))
