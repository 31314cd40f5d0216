"""Fit models of step time and memory to measured windows, and predict untried configurations.

Pure: NumPy, SciPy and scikit-learn, the last two loaded by the first fit. See docs/internals/perf_model.md.
"""

from lightning_dlrover.perf.columns import Columns, Configuration, configuration_of
from lightning_dlrover.perf.hardware import population_of
from lightning_dlrover.perf.memory_model import MemoryModel, MemoryPrediction
from lightning_dlrover.perf.model import Prediction, StepTimeModel
from lightning_dlrover.perf.population import Population
from lightning_dlrover.perf.prior import PhysicalPrior
from lightning_dlrover.perf.samples import STEP_PARTS, StepProfile

__all__ = [
    "STEP_PARTS",
    "Columns",
    "Configuration",
    "MemoryModel",
    "MemoryPrediction",
    "PhysicalPrior",
    "Population",
    "Prediction",
    "StepProfile",
    "StepTimeModel",
    "configuration_of",
    "population_of",
]
