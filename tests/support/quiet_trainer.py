"""A Trainer for tests that look at anything but its output."""

from __future__ import annotations

from typing import Any

import lightning as L


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
    return L.Trainer(**{**quiet, **options})
