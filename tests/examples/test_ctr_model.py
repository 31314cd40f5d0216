from __future__ import annotations

import os
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from ctr_data import ClickData, collate, load
from ctr_model import WideAndDeep, auc_of_counts, count_scores, measure_auc
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader

from tests.support.quiet_trainer import quiet_trainer

ADULT = Path(os.environ.get("DLROVER_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")) / "adult"


@pytest.fixture
def generated() -> ClickData:
    return load(None, seed=1, rows=4000)


def fit(data: ClickData, model: WideAndDeep, epochs: int, batch_size: int = 256) -> L.Trainer:
    torch.set_num_threads(1)
    trainer = quiet_trainer(max_epochs=epochs)
    train = DataLoader(data.train, batch_size, shuffle=True, collate_fn=collate)
    trainer.fit(model, train, DataLoader(data.val, batch_size, collate_fn=collate))
    return trainer


def small_model(data: ClickData) -> WideAndDeep:
    L.seed_everything(1, verbose=False)
    return WideAndDeep(data.cardinalities, data.num_numbers, width=32, learning_rate=3e-3)


def test_training_lowers_the_loss(generated: ClickData) -> None:
    model = small_model(generated)
    rows = generated.train
    with torch.no_grad():
        before = torch.nn.functional.binary_cross_entropy_with_logits(model(rows.numbers, rows.categories), rows.labels)
    fit(generated, model, epochs=3)
    model.eval()
    with torch.no_grad():
        after = torch.nn.functional.binary_cross_entropy_with_logits(model(rows.numbers, rows.categories), rows.labels)
    assert after < 0.9 * before


def test_the_logged_validation_figures_are_those_of_the_whole_set(generated: ClickData) -> None:
    model = small_model(generated)
    trainer = fit(generated, model, epochs=1)
    model.eval()
    with torch.no_grad():
        logits = model(generated.val.numbers, generated.val.categories)
    labels = generated.val.labels
    assert float(trainer.callback_metrics["val_auc"]) == pytest.approx(roc_auc_score(labels, logits), abs=1e-4)
    expected_loss = float(torch.nn.functional.binary_cross_entropy_with_logits(logits, labels))
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(expected_loss, abs=1e-5)
    assert "train_loss" in trainer.callback_metrics


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
def test_validation_auc_does_not_depend_on_how_samples_were_spread(num_workers: int) -> None:
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(0, 3, 10_001), dtype=torch.float32)
    labels = torch.tensor(rng.random(10_001) < torch.sigmoid(logits).numpy()).float()
    cuts = torch.as_tensor(np.sort(rng.integers(0, 10_001, num_workers - 1)))
    parts = zip(torch.tensor_split(logits, cuts), torch.tensor_split(labels, cuts), strict=True)
    counts = torch.stack([count_scores(*part) for part in parts]).sum(dim=0)
    assert torch.equal(counts, count_scores(logits, labels))
    assert auc_of_counts(counts) == pytest.approx(roc_auc_score(labels, logits), abs=1e-4)


def test_the_largest_logits_are_counted_too() -> None:
    counts = count_scores(torch.tensor([-1e6, 1e6, 0.0]), torch.tensor([0.0, 1.0, 1.0]))
    assert counts.sum(dim=1).tolist() == [1.0, 2.0]
    assert auc_of_counts(counts) == 1.0


def test_measuring_the_auc_leaves_the_models_mode_and_gradients(generated: ClickData) -> None:
    model = small_model(generated).train()
    auc = measure_auc(model, generated.test, batch_size=100)
    assert auc == measure_auc(model, generated.test, batch_size=7)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.skipif(not ADULT.is_dir(), reason="the Adult rows are not on this machine")
def test_two_epochs_on_adult_reach_a_test_auc_of_0_90() -> None:
    data = load(ADULT, seed=1, rows=1000)
    L.seed_everything(1, verbose=False)
    model = WideAndDeep(data.cardinalities, data.num_numbers, width=256, learning_rate=2e-3)
    fit(data, model, epochs=2, batch_size=512)
    assert measure_auc(model, data.test) >= 0.90
