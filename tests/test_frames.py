"""Frames of threads, taken while garbage waits to be collected."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from lightning_dlrover.host import current_frames, main_thread_frame

COLLECTS = """
import gc, threading, time
from lightning_dlrover.host import current_frames

class Slow:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0.001)  # lets the other threads run, which take the lock of all threads whenever one starts

def start_threads():
    while not done:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

done = False
gc.set_threshold(1)
for _ in range(2):
    threading.Thread(target=start_threads, daemon=True).start()
for _ in range(300):
    gc.disable()
    for _ in range(3):
        Slow()
    gc.enable()  # the next new object lets it collect
    current_frames()
done = True
print("ended")
"""


def test_frames_are_taken_while_other_threads_make_garbage() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTS], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "ended\n", done.stderr


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collection_is_as_it_was_afterwards(is_enabled: bool) -> None:
    try:
        gc.enable() if is_enabled else gc.disable()
        frames = current_frames()
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()
    assert frames[threading.get_ident()].f_code.co_name == "current_frames"


def test_frame_of_the_main_thread_is_found_from_another() -> None:
    found: list[object] = []
    other = threading.Thread(target=lambda: found.append(main_thread_frame()))
    other.start()
    other.join()
    assert found[0] is not None
