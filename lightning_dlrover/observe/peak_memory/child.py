"""Run a function in a forked copy of this process, so that nothing that it does reaches the training.

The copy has this thread only. Other threads' locks may stay locked in it, which its deadline covers.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightning_dlrover.observe.peak_memory.resident import resident

__all__ = ["ChildError", "run_in_child"]


class ChildError(Exception):
    """The copy did not return a result; the message gives the cause."""


def run_in_child(function: Callable[[], Any], deadline_s: float, extra_bytes: int | None = None) -> Any:
    """Return the result of `function`, which has to be JSON, from a forked copy of this process.

    Args:
        deadline_s: seconds until the copy is killed.
        extra_bytes: private memory that the copy may allocate beyond this process's.
    Raises:
        ChildError: the copy failed, was killed, or passed its deadline or limit.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of it: see the module's docstring
        try:
            process_id = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            raise ChildError(f"this process cannot be copied: {error}") from error
    if process_id == 0:
        _work(function, writing, deadline_s, extra_bytes)
    os.close(writing)
    try:
        answer = _read(reading, deadline_s)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
        with suppress(ChildProcessError):  # a handler of SIGCHLD has reaped it
            os.waitpid(process_id, 0)
    if not answer:
        raise ChildError(f"the copy ended, or was killed after {deadline_s:g} s, without an answer")
    result = json.loads(answer)
    if "error" in result:
        raise ChildError(result["error"])
    return result["result"]


def _work(function: Callable[[], Any], writing: int, deadline_s: float, extra_bytes: int | None) -> None:
    """Run the function, write its result, and end, whatever happens."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(int(deadline_s) + 1)  # ends the copy should its parent die
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else the first backward pass would take memory of each GPU
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        if extra_bytes is not None:
            limit = resident().data_bytes + extra_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        answer = {"result": function()}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"}
    with suppress(BaseException):
        data = json.dumps(answer).encode()
        while data:
            data = data[os.write(writing, data) :]
    os._exit(0)


def _read(reading: int, deadline_s: float) -> bytes:
    end, answer = time.monotonic() + deadline_s, b""
    while (left := end - time.monotonic()) > 0:
        if select.select([reading], [], [], left)[0]:
            part = os.read(reading, 1 << 16)
            if not part:
                return answer
            answer += part
    return b""
