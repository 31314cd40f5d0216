"""Decide whether DDP has to search each backward pass for parameters without a gradient.

A process that trains alone needs no such search, so its script may leave parameters out of a step: a frozen branch, the other
network of a GAN. DDP without the search waits for those gradients for ever. Every worker therefore detects such parameters,
alone and under DDP, and the workers of a round agree on the outcome through their positions.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from typing import Any, Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.checks.script import UnsupportedScriptError

__all__ = ["IncompleteBackwardError", "UnusedParameters"]

log = logging.getLogger(__name__)

NUM_WATCHED = 50
"""Number of backward passes in which a worker that trains alone looks for parameters without a gradient."""

NUM_NAMED = 3
"""Maximum number of parameters that the report names."""


class IncompleteBackwardError(RuntimeError):
    """DDP waits for gradients that the backward pass did not produce. All workers have to repeat the step."""


class HasTableNames(Protocol):
    """A strategy whose model may have sharded tables."""

    @property
    def table_names(self) -> set[str]: ...


class UnusedParameters:
    """Detects whether this job's models have parameters that a step may leave out.

    Args:
        ddp_kwargs: the user's arguments of DDP. A choice made there is kept.
        is_live: whether the world may change. Otherwise DDP stays as Lightning sets it up.

    Attributes:
        found: whether DDP has to search for them from the next wrap on.
    """

    def __init__(self, ddp_kwargs: dict[str, Any], is_live: bool) -> None:
        self.is_fixed = not is_live or "find_unused_parameters" in ddp_kwargs or bool(ddp_kwargs.get("static_graph"))
        self.found = False
        self._num_watched = 0

    def note_optimizers(self, is_automatic: bool, num_optimizers: int) -> None:
        """Expect unused parameters with several optimizers of manual optimization, each with its own part and backward pass."""
        if not self.is_fixed and not is_automatic and num_optimizers > 1:
            self.found = True

    def agree(self, found: bool, is_reporter: bool) -> None:
        """Adopt the common result of a new round's workers."""
        if self.is_fixed or found == self.found:
            return
        if found and is_reporter:
            log.info("DDP searches for unused parameters from now on: another worker has found some")
        self.found = found

    @contextlib.contextmanager
    def searching(self) -> Iterator[None]:
        """Run a backward pass with or without DDP's search.

        Raises:
            UnsupportedScriptError: the search has failed in reentrant checkpoints, which it cannot see through.
        """
        try:
            yield
        except RuntimeError as error:
            if self.is_fixed or not self.found or "ready only once" not in str(error):
                raise
            raise UnsupportedScriptError(
                "some steps leave parameters out, so DDP searches each backward pass for them, and that fails with activation "
                "checkpointing in its reentrant form: call torch.utils.checkpoint.checkpoint with use_reentrant=False (for "
                'models of transformers: gradient_checkpointing_kwargs={"use_reentrant": False})'
            ) from error

    def check(self, module: nn.Module, model: Any, strategy: HasTableNames, num_workers: int, is_reporter: bool) -> None:
        """Call after each backward pass.

        Args:
            model: `module`, or the DDP that wraps it.
            strategy: has the names of the tables, which get no gradient by design.

        Raises:
            IncompleteBackwardError: DDP cannot complete its reduction.
        """
        if self.is_fixed or self.found:
            return
        if num_workers == 1:
            if self._num_watched < NUM_WATCHED:
                self._num_watched += 1
                self.found = bool(_without_gradient(module, strategy.table_names))
            return
        if not isinstance(model, DistributedDataParallel) or not model.require_backward_grad_sync:
            return
        try:
            model._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            self.found = True
            names = _without_gradient(module, strategy.table_names)
            text = ", ".join(names[:NUM_NAMED]) + (f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else "")
            text = text or "some of those that another step has used"
            if is_reporter:
                log.warning("This step does not use all parameters (%s): DDP searches for unused ones from now on", text)
            raise IncompleteBackwardError(f"the backward pass gave no gradient to {text}") from error


def _without_gradient(module: nn.Module, ignored: Collection[str]) -> list[str]:
    return [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None and name not in ignored]
