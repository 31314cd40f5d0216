"""A script's view of its job: the world, a notice that this worker will be taken away, and the hooks that follow both.

A world that this worker has entered, and a notice that it has received, wait here until the next boundary between two batches.
There the hooks run, one world at a time and in the order of rounds. docs/guide/hooks.md describes them to users.

| state | set by | read by |
| --- | --- | --- |
| worlds that wait | `entered`, when a round has formed | `deliver` |
| the newest world that the hooks have seen | `deliver`, `continue_from` | `deliver` |
| the newest notice that the hooks have seen | `deliver` | `deliver` |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_dlrover.live.order import FitPosition
from lightning_dlrover.live.replica import TrainerOfFit
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.membership.member import Formation

REFUSAL = (
    "on_world_change and on_notice run on each worker by itself, and the others may be elsewhere: call collectives, "
    "trainer.save_checkpoint and self.log(..., sync_dist=True) in a hook that all workers run, such as on_train_batch_end"
)


@dataclass(frozen=True)
class WorldInfo:
    """The workers of a job, as one of them takes part.

    Example:
        >>> WorldInfo(size=2, rank=0, round=3, wanted=4)
        WorldInfo(size=2, rank=0, round=3, wanted=4)
    """

    size: int  # workers that train
    rank: int  # global rank of this worker
    round: int  # number of the round; 0 outside of a job, and on a worker that waits to join one
    wanted: int  # workers that the job's plan asks for


@dataclass(eq=False)
class ScriptHooks:
    """Calls `on_world_change` and `on_notice` of one worker's callbacks and module."""

    _world: World
    _trainer: TrainerOfFit
    _position: FitPosition
    _first: Formation | None = field(init=False)  # the first round of a worker that did not join later
    _seen: WorldInfo | None = None  # None until the first call
    _newest: int = 0  # number of the newest round that waits, or that the hooks have seen
    _waiting: deque[Formation] = field(default_factory=deque)
    _noticed: float | None = None

    def __post_init__(self) -> None:
        self._first = self._position.formation
        self._newest = self._position.round_number

    @property
    def world(self) -> WorldInfo:
        """The world of this worker's round."""
        formation = self._position.formation
        if formation is None:
            strategy = self._trainer.strategy
            return WorldInfo(strategy.world_size, strategy.global_rank, 0, self._wanted(strategy.world_size))
        return self._of(formation)

    def continue_from(self, former: ScriptHooks) -> None:
        """Continue after an earlier Trainer of the script. Changes since its end are still to be delivered."""
        self._first, self._seen, self._newest = former._first, former._seen, former._newest
        self._waiting, self._noticed = former._waiting, former._noticed

    def entered(self, formation: Formation) -> None:
        """Note a round that has formed. A round that broke before all workers had a common state counts, too."""
        if formation.round.number > self._newest:
            self._newest = formation.round.number
            self._waiting.append(formation)

    def admitted(self, formation: Formation) -> None:
        """Note that this worker has the job's state. Rounds in which it did not receive it do not count."""
        self._waiting = deque([formation])

    def deliver(self) -> None:
        """Run the hooks for a notice, and for all worlds that wait.

        Raises:
            Exception: a hook has failed, which ends the fit like an error in any other hook.
        """
        if not self._position.has_entered:
            return
        notice = self._world.notice
        if notice is not None and notice != self._noticed:
            self._noticed = notice
            self._call("on_notice", notice)
        while self._waiting:
            former = self._seen or (self._of(self._first) if self._first is not None else None)
            self._seen = self._of(self._waiting.popleft())
            self._call("on_world_change", former, self._seen)

    def deliver_then(self, end: Callable[[], None]) -> None:
        """Run the hooks for changes after the last batch, before the hooks of the training's end."""
        self.deliver()
        end()

    def _call(self, name: str, *args: Any) -> None:
        trainer, module = self._trainer.lightning, self._trainer.module
        with self._world.alone(REFUSAL):
            for callback in self._trainer.callbacks:
                if callable(hook := getattr(callback, name, None)):
                    hook(trainer, module, *args)
            if callable(hook := getattr(module, name, None)):
                hook(*args)

    def _of(self, formation: Formation) -> WorldInfo:
        return WorldInfo(formation.size, formation.rank, formation.round.number, self._wanted(formation.size))

    def _wanted(self, size: int) -> int:
        plan = self._world.view.plan
        return plan.num_workers if plan is not None and plan.binding else size
