"""Start one node's elastic agent so that it cannot outlive whoever started it.

TorchX's local scheduler gives every app a session of its own; without this a controller that is killed would leave its nodes
behind. Run as `python -m lightning_dlrover.components.node ARGS...`; ARGS are those of torchrun.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["main"]

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become torchrun; the process id stays the same."""
    if os.environ.get("DLROVER_DIE_WITH_PARENT"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == 1:
            raise SystemExit("the process that started this node has ended already")
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *sys.argv[1:]])


if __name__ == "__main__":
    main()
