"""Stack traces of this process, for people."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_dlrover.tuning.health import MAX_CHARACTERS, innermost_user_place, is_in_debugger, stacks


@contextmanager
def waiting_threads(num: int, name: str) -> Iterator[None]:
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, name=f"{name}{i}") for i in range(num)]
    for thread in threads:
        thread.start()
    yield
    end.set()
    for thread in threads:
        thread.join()


SEVERAL = """
import threading
from lightning_dlrover.tuning.health import stacks

def of_the_script():
    return stacks()

end = threading.Event()
for name in ("user-0", "user-1", "dlrover-0", "dlrover-1"):
    threading.Thread(target=end.wait, name=name).start()
print(of_the_script())
end.set()
"""


def test_the_main_thread_comes_first_and_threads_of_ours_are_left_out() -> None:
    # In an interpreter of its own: threads that other tests have left in this one would take the room.
    done = subprocess.run([sys.executable, "-c", SEVERAL], capture_output=True, text=True, timeout=60, check=True)
    text = done.stdout
    assert text.startswith("thread MainThread:")
    assert "in of_the_script" in text
    assert ("thread user-0:" in text, "thread user-1:" in text, "dlrover-0" in text) == (True, True, False)


DEEP = """
import threading
from lightning_dlrover.tuning.health import stacks

def deep_LONG(calls):
    return deep_LONG(calls - 1) if calls else stacks()

end = threading.Event()
for number in range(2):
    threading.Thread(target=end.wait, name=f"user-{number}").start()
print(deep_LONG(100))
end.set()
""".replace("LONG", "g" * 250)


def test_deep_main_thread_leaves_room_for_the_others() -> None:
    # In an interpreter of its own: other threads of this one, and the length of its paths, would decide what fits.
    done = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=60, check=True)
    text = done.stdout.rstrip("\n")
    assert MAX_CHARACTERS / 2 < len(text) <= MAX_CHARACTERS
    assert (text.count("thread user-"), "shortened" in text, " in deep" in text) == (2, False, True)


def test_text_of_deep_stacks_stays_small_with_the_innermost_calls() -> None:
    def deep(calls: int) -> str:
        return deep(calls - 1) if calls else innermost()

    def innermost() -> str:
        return stacks()

    with waiting_threads(50, "user-"):
        text = deep(300)
    assert len(text) <= MAX_CHARACTERS
    assert "calls left out" in text
    assert "in innermost" in text


def test_the_innermost_place_is_one_of_the_users_code() -> None:
    found: list[str] = []

    def user_code(end: threading.Event) -> None:
        def look() -> None:
            found.append(innermost_user_place())
            end.set()

        watcher = threading.Thread(target=look)
        watcher.start()
        end.wait()  # the innermost call is one of the standard library

    user_code(threading.Event())
    assert found[0].startswith(__file__)
    assert found[0].endswith("in user_code")


def test_tests_run_without_a_debugger() -> None:
    assert not is_in_debugger()
