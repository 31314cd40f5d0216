"""The strategy as the parts of a live fit use it: Lightning's DDP strategy, and what `strategy.py` adds to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from lightning_dlrover.either_strategy import EitherStrategy

if TYPE_CHECKING:
    from lightning_dlrover.live.tables_of_trainer import TablesOfTrainer
    from lightning_dlrover.live.unused_parameters import UnusedParameters
    from lightning_dlrover.observe.pulse import OwnClock
    from lightning_dlrover.tables.elastic import ElasticTables


class DenseReplica(Protocol):
    """The dense parameters of the model, see `replica.py`."""

    unused: UnusedParameters

    def wrap_what_was_unfrozen(self) -> None: ...

    def wrap_anew(self, in_validation: bool = False) -> None: ...


class LiveStrategy(EitherStrategy):
    """Base of `DLRoverStrategy`, which fills it."""

    replica: DenseReplica
    clock: OwnClock
    tables: TablesOfTrainer | None  # None if the model has none
    fingerprint: str  # identity of a model before its tables are sharded
    unread_checkpoint: tuple[int, str] | None  # step and folder of the user's checkpoint; a joiner skips it
    has_global_batch_size: bool
    compares_data: bool
    reruns_epoch_hooks: bool
    max_share: int | Literal["whole"] | None
    on_drift: Literal["end", "repair", "ignore"]

    def enter_round(self, global_rank: int, world_size: int) -> None:
        """Take a place in a new round."""
        raise NotImplementedError

    def show_place(self, global_rank: int, world_size: int) -> None:
        """Set what the Trainer's attributes say, to the user's code too."""
        raise NotImplementedError

    @property
    def elastic_tables(self) -> ElasticTables | None:
        """The model's tables in a live job; None if it has none."""
        raise NotImplementedError

    @property
    def table_names(self) -> set[str]:
        """Names of the parameters that are torchrec's tables."""
        raise NotImplementedError

    @property
    def sharded_names(self) -> set[str]:
        """Names of the parameters that differ between workers."""
        raise NotImplementedError
