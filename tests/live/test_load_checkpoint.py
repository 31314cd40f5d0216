"""What a strategy takes over from a checkpoint, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn

from tests.support.live_parts import Wrapping, a_trainer

START = {
    "start_workers": 2,
    "lane_workers": 2,
    "streams": [{"stream": "rows", "epoch": 1}],
    "iterables": [{"row": 3}],
    "random": {"seed": "1"},
}


@pytest.mark.parametrize("key", ["iterables", "sequences"])  # the second one is of earlier commits
@pytest.mark.parametrize("fn", [TrainerFn.FITTING, TrainerFn.VALIDATING, TrainerFn.TESTING, TrainerFn.PREDICTING])
def test_only_a_fit_goes_back_to_a_checkpoints_rows(fn: TrainerFn, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {name if name != "iterables" else key: value for name, value in START.items()}
    monkeypatch.setattr(Strategy, "load_checkpoint", lambda *args: {"dlrover": saved})
    trainer = a_trainer()
    trainer.state = SimpleNamespace(fn=fn)
    resumed: list[Any] = []
    live: Any = SimpleNamespace(
        windows=SimpleNamespace(resume=resumed.extend),
        loaders=SimpleNamespace(saved={}),
        checkpoints=SimpleNamespace(saved_random=None),
    )
    strategy: Any = Wrapping(trainer.lightning_module)
    strategy._job = SimpleNamespace(live=live, start_workers=1, lane_workers=1)
    strategy.load_checkpoint("best.ckpt")
    is_fit = fn == TrainerFn.FITTING
    assert (resumed, live.loaders.saved) == ((START["streams"], START) if is_fit else ([], {}))
    assert live.checkpoints.saved_random == (START["random"] if is_fit else None)
