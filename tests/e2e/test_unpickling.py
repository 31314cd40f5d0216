"""No worker unpickles what another one has sent, in whichever library the call is.

`tests/test_no_pickle.py` reads our own files. Here the unpicklers themselves refuse.
"""

from __future__ import annotations

import pytest

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.table_job import TableSettings
from tests.e2e.toy_job import ToySettings

pytest.importorskip("tensorboardX", reason="TensorBoardLogger needs it")

from tests.e2e.unpickling_jobs import train_tables_without_pickle, train_without_pickle


def test_a_live_fit_with_its_callbacks_and_loggers_unpickles_nothing(make_job: MakeJob) -> None:
    job = make_job(ToySettings(num_rows=120, batch_size=4, max_epochs=2, step_s=0.05), script=train_without_pickle)
    job.start_all(2)
    job.wait_for_world(2)
    job.start()
    job.wait_for_world(3)
    job.workers[1].process.kill()
    job.wait_for_world(2)
    assert sorted(job.finish()) == [-9, 0, 0], job.report()


def test_tables_their_checkpoint_and_their_growth_unpickle_no_foreign_class(make_job: MakeJob) -> None:
    settings = TableSettings(save_at=20, step_s=0.05)
    job = make_job(settings, script=train_tables_without_pickle)
    job.start_all(2)
    job.wait_for_world(2)
    job.start()
    job.wait_for_world(3)
    assert job.finish() == [0, 0, 0], job.report()
    assert (job.folder / "checkpoint" / "tables").is_dir()
