"""The data of a fit, as the workers of a job compare it with each other's and put it on record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_dlrover.live import lightning_names
from lightning_dlrover.live.data_fingerprint import DataFingerprint, fingerprint_data, refuse_other_data
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.opened_streams import opened_streams, sentence
from lightning_dlrover.live.ports import Batches, Job, Round, TrainerPort
from lightning_dlrover.live.position import FitPosition, Position
from lightning_dlrover.live.sequences import compare_next_batches, opened_sequences

__all__ = ["DataOfFit"]


class DataOfFit:
    """One worker's part in comparing and recording the data of its `fit`."""

    def __init__(self, job: Job, round_: Round, batches: Batches, trainer: TrainerPort, position: FitPosition) -> None:
        self._job = job
        self._round = round_
        self._batches = batches
        self._trainer = trainer
        self._position = position

    def fingerprint(self) -> DataFingerprint:
        """Return the fingerprint of this worker's training and validation data."""
        val = lightning_names.combined_loader(self._trainer.epoch_loop.val_loop)
        val_loaders = [x for x in val.flattened if isinstance(x, ElasticLoader)] if val is not None else None
        compare = self._trainer.strategy.compares_data and self._job.config.max_workers > 1
        return fingerprint_data(self._batches.all, val_loaders, compare)

    def refuse_data_of_another_job(self, data: DataFingerprint) -> None:
        """Raise `MembershipError` if the job trains on other data than this worker has."""
        job = self._job.view.job
        if job is not None and job.data:
            run = f"run {self._job.config.run_id!r}: this worker's data"
            refuse_other_data(data, job.data, run, "the job's", self._job.standing.consequence_of_refusal())

    def put_on_record(self, begins_epoch: bool = False) -> None:
        """Let rank 0 record the streams and iterable datasets that the fit reads."""
        if self._round.rank == 0:
            loaders, number = self._batches.all, self._position.fit
            for opened in opened_streams(self._trainer.lightning, loaders, number, begins_epoch):
                self._job.event(opened, sentence(opened))
            for sequence, text in opened_sequences(loaders, number):
                self._job.event(sequence, text)

    def compare_next_batches(self, joining: Sequence[str] = ()) -> None:
        """Make sure that all workers read the same rows of an `IterableDataset`.

        Args:
            joining: workers without the state, which are refused if their rows differ.
        """
        formation = self._round.formation
        assert formation is not None
        ranks = [formation.rank_of(worker) for worker in joining]
        compare_next_batches(self._batches.all, self._round, ranks)

    def compare_with_joiners(self, standing: Mapping[str, Position], joining: Sequence[tuple[str, str]]) -> None:
        """Let joiners read up to the others, before any step depends on them.

        Args:
            standing: positions of the workers with the state.
            joining: pairs of a worker with the state and the joiner that receives it.
        """
        if standing and joining and not self._position.is_between_fits:
            self.compare_next_batches([worker for _, worker in joining])
