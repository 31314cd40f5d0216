from __future__ import annotations

import math

import numpy as np
import pytest
from ctr_auc import weighted_auc
from sklearn.metrics import roc_auc_score


@pytest.mark.parametrize("seed", range(20))
def test_auc_equals_scikit_learns_with_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 1 + 10 ** rng.integers(1, 4), size=500) / 7
    labels = rng.integers(0, 2, size=500)
    expected = roc_auc_score(labels, scores)
    assert weighted_auc(scores, labels, 1 - labels) == pytest.approx(expected, abs=1e-12)


def test_auc_with_weights_equals_auc_of_repeated_rows() -> None:
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 9, size=40).astype(float)
    positive, negative = rng.integers(0, 5, size=(2, 40))
    repeated = np.concatenate([np.repeat(scores, positive), np.repeat(scores, negative)])
    labels = np.concatenate([np.ones(positive.sum()), np.zeros(negative.sum())])
    assert weighted_auc(scores, positive, negative) == pytest.approx(weighted_auc(repeated, labels, 1 - labels))


def test_auc_is_not_a_number_when_a_class_is_absent() -> None:
    assert math.isnan(weighted_auc([0.1, 0.2], [1, 1], [0, 0]))
    assert math.isnan(weighted_auc([], [], []))
