"""A Trainer without output, for tests that do not check it."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning as L

lightning: Any = importlib.import_module(os.environ.get("TOY_PACKAGE", "lightning"))
"""Lightning package of this process: a test may allow only one of the two."""


def quiet_trainer(**options: Any) -> L.Trainer:
    """Return a Trainer on one core that writes and shows nothing. `options` are further ones, or replace these."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    trainer: L.Trainer = lightning.Trainer(**{**quiet, **options})
    return trainer
