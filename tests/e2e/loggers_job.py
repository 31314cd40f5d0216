"""A script that logs every step with loggers that write files."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverStrategy
from tests.e2e.feature_jobs import Logged
from tests.e2e.toy_job import Recorder, Rows, ToySettings, make_trainer


def train_and_log(recorder: Recorder, settings: ToySettings) -> None:
    """Train and log every step."""
    L.seed_everything(1, verbose=False)
    folder = recorder.place.folder
    loggers = [CSVLogger(folder, name="table", flush_logs_every_n_steps=1), TensorBoardLogger(folder, name="board")]
    trainer = make_trainer(
        folder,
        strategy=DLRoverStrategy(check_interval_s=0.03),
        logger=loggers,
        log_every_n_steps=1,
        callbacks=[TQDMProgressBar(refresh_rate=1)],
        enable_progress_bar=True,
        max_epochs=settings.max_epochs,
        limit_val_batches=0,
    )
    trainer.fit(Logged(recorder, settings.step_s), DataLoader(Rows(settings.num_rows), settings.batch_size, shuffle=True))
    recorder.write("after_fit", versions=[logger.version for logger in loggers])
