"""Start one node's elastic agent so that it cannot outlive whoever started it.

TorchX's local scheduler gives every app a session of its own; without this a controller that is killed would
leave its nodes behind. Run as `python -m lightning_dlrover.components.node ARGS...`; ARGS are those of
torchrun.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["PARENT_VARIABLE", "main"]

PARENT_VARIABLE = "DLROVER_DIE_WITH_PID"
"""Process id of the parent that this node ends with; not set where nodes live on their own."""

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become torchrun; the process id stays the same."""
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            raise SystemExit("the process that started this node has ended already")
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *sys.argv[1:]])


if __name__ == "__main__":
    main()
