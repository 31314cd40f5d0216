"""The loop of most jobs, which also prints whether its process was forked, and can fail once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lightning_dlrover.spares import is_forked
from tests.e2e import tiny_loop


def main() -> None:
    failing = Path(sys.argv.pop(1))
    print(f"process {os.getpid()}: forked {is_forked()}", flush=True)
    if failing.exists() and is_forked():
        failing.unlink()
        raise ArithmeticError("the script's own error")
    tiny_loop.main()


if __name__ == "__main__":
    main()
