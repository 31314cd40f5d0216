"""Loader workers start while signals arrive that are meant for their worker."""

from __future__ import annotations

import multiprocessing.util
import os
import signal

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from lightning_dlrover.live.loader import ElasticLoader


class Signalled:
    """Sends SIGTERM to each process that is forked, before torch or the package runs in it, as long as it is referenced."""

    def __init__(self) -> None:
        multiprocessing.util.register_after_fork(self, Signalled.end)

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class SignalMasks(Dataset[torch.Tensor]):
    """Whether the process that fetches a sample blocks SIGTERM."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        assert get_worker_info() is not None
        return torch.tensor(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, set()))


def test_loader_worker_survives_the_end_of_its_group_while_it_starts() -> None:
    loader = ElasticLoader(DataLoader(TensorDataset(torch.arange(4)), 1, num_workers=1), 1, training=False)
    signalled = Signalled()
    try:
        assert [int(batch[0]) for batch in iter(loader)] == [0, 1, 2, 3]
    finally:
        loader.close()
        del signalled


def test_started_loader_worker_takes_signals_again() -> None:
    loader = ElasticLoader(DataLoader(SignalMasks(), 1, num_workers=1), 1, training=False)
    try:
        assert not any(bool(batch) for batch in iter(loader))
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    finally:
        loader.close()
