"""`tiny_script.py` whose workers take more memory, step by step, once a file names the MiB that each shall have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e import tiny_script

MIB = 1 << 20
MIB_PER_STEP = 10


class Growing(tiny_script.TinyModel):
    ballast: list[bytes]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        file = Path("ballast")
        self.ballast = getattr(self, "ballast", [])
        if file.exists() and len(self.ballast) * MIB_PER_STEP < int(file.read_text()):
            self.ballast.append(b"x" * (MIB_PER_STEP * MIB))


if __name__ == "__main__":
    tiny_script.TinyModel = Growing  # type: ignore[misc]
    tiny_script.main()
