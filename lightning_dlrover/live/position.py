"""Each worker's place in the training program: as it changes on this worker, and as workers publish it on entering a round."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dlrover.codec import from_fields, to_json
from lightning_dlrover.rdzv.live.member import Formation

__all__ = ["FitPosition", "Position", "can_meet"]


@dataclass(frozen=True)
class Position:
    """A worker's place in the training program, published to the others on entering a round."""

    updates: int  # optimizer updates done (gradient accumulation: windows)
    batch: int  # global batches handed out over all epochs
    in_step: bool
    collective: int  # collectives outside of steps since the newest batch was handed out
    validation: int  # number of the current validation run; 0 outside
    at_boundary: bool  # between two batches and two windows, where joiners can receive the state
    tables: int = 0  # last round with all sharded tables in its members' memory; 0: no tables, or incomplete ones
    has_unused: bool = False  # parameters without a gradient were found, so DDP has to search for them
    stopped_at: str = ""  # newest place at which all workers wanted to stop, see `Votes.agree_on_stop`
    fit: int = 1  # number of this `fit` in the script
    values: tuple[int, ...] = (0, 0, 0, 0)  # version of the kept epoch values, see `kept_values.Version`

    def encode(self) -> bytes:
        return to_json(self)

    @staticmethod
    def decode(hello: bytes) -> Position | None:
        """Return the position, or None for a joiner, which has none yet.

        Raises:
            ValueError: these bytes are no position.
        """
        if not hello:
            return None
        return from_fields(Position, json.loads(hello), "a worker's position")


def can_meet(hellos: Mapping[str, bytes]) -> bool:
    """Return whether the workers entering a round can continue together: joiners can receive the state only between steps.

    They cannot join a later `fit`, as they are in the script's first. The round may be older than the others' later `fit`.
    """
    positions = [Position.decode(hello) for hello in hellos.values()]
    standing = [p for p in positions if p is not None]
    if len(standing) in (0, len(positions)):
        return True
    return all(p.at_boundary and p.batch == standing[0].batch and p.fit == 1 for p in standing)


@dataclass
class FitPosition:
    """This worker's place in its round and in the fit.

    Args:
        formation: the worker's round; None on a worker that joins later.
    """

    formation: Formation | None
    fit: int = 1  # number of this `fit` in the script
    is_standby: bool = False  # waits to be admitted
    is_in_loops: bool = False  # set from the Trainer's run-stage barrier on
    has_entered: bool = False  # set once the training loop is reached; from here on the worker survives losses
    is_between_fits: bool = False
    is_finishing: bool = False
    is_saving: bool = False  # set while a checkpoint is saved
    updates: int = 0
    batch: int = 0
    in_step: bool = False
    is_redoing: bool = False  # set while the open window's batches are repeated, between two batches
    collective: int = 0
    validation: int = 0
    at_boundary: bool = False
    stopped_at: str = ""
    is_repeatable: bool = False  # set in work outside of steps that a loss may interrupt, as it is done again
    looks: int = 0  # times that it has looked for new rows of a stream
    is_in_parts: bool = False  # set while a share is computed in parts, which others wait for
    parts: int = 0  # parts of shares that it has begun

    @property
    def rank(self) -> int:
        return self.formation.rank if self.formation is not None else 0

    @property
    def size(self) -> int:
        """Workers of the current round; 1 on a worker that is not admitted yet."""
        return self.formation.size if self.formation is not None else 1

    @property
    def is_computing(self) -> bool:
        """Whether collectives belong to a batch that would be repeated as a whole."""
        return self.in_step or self.is_redoing

    def published(self, in_window: bool, tables: int, has_unused: bool, values: tuple[int, ...]) -> Position:
        """Return the position for the other workers.

        Args:
            in_window: whether gradients of earlier batches wait for an optimizer step.
            values: version of the kept epoch values.
        """
        return Position(
            self.updates,
            self.batch,
            self.in_step,
            self.collective,
            self.validation,
            self.at_boundary and not in_window,
            tables,
            has_unused,
            self.stopped_at,
            self.fit,
            values,
        )

    def describe(self) -> str:
        """Describe the position for an error message. Called from any thread."""
        if not self.has_entered or self.is_between_fits:
            return "before the first step"
        where = "in a training step" if self.in_step else "between two steps"
        if self.validation:
            where = f"in validation run {self.validation}"
        return f"{where} (batch {self.batch})"
