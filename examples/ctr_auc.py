"""The area under the ROC curve, from scores that carry any amount of positive and negative weight.

One function serves the exact test figure (weights 0 and 1), the validation figure summed over workers (counts
per bin of the score) and the best that a planted click model allows (probabilities as weights).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def weighted_auc(scores: npt.ArrayLike, positive: npt.ArrayLike, negative: npt.ArrayLike) -> float:
    """Probability that a random positive scores above a random negative; equal scores count one half.

    Args:
        scores: any order, shape ``(num_rows,)``.
        positive: positive weight of each row (its label, its probability, or a count).
        negative: negative weight of each row.
    Returns:
        A number in [0, 1], or NaN when one of the two classes is absent.
    """
    _, group = np.unique(np.asarray(scores, dtype=np.float64), return_inverse=True)
    positives = np.bincount(group, weights=np.asarray(positive, dtype=np.float64))
    negatives = np.bincount(group, weights=np.asarray(negative, dtype=np.float64))
    num_pairs = positives.sum() * negatives.sum()
    if num_pairs == 0:
        return float("nan")
    negatives_below = np.cumsum(negatives) - negatives
    return float((positives * (negatives_below + 0.5 * negatives)).sum() / num_pairs)
