"""Profiles of real workers, data-parallel and with sharded tables."""

from __future__ import annotations

import pytest

pytest.importorskip("torchrec", reason="one of the two models has sharded tables")

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job.records import Keys, decode
from lightning_dlrover.tuning.samples import STEP_PARTS, StepProfile
from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job
from tests.e2e.profiled_job import DENSE_FLOPS, LOOKUPS, TABLE_BYTES, Profiled, train_profiled

MIB = 1 << 20


def profiles_of(job: Job, client: EtcdClient, num_workers: int) -> dict[int, StepProfile]:
    """Newest profile of each rank, once every rank has one in this world."""

    def look() -> dict[int, StepProfile] | None:
        entries = client.get_prefix(Keys(job.run_id).profiles)[1]
        found = [decode(StepProfile, entry.value, entry.key) for entry in entries]
        by_rank = {p.global_rank: p for p in found if p.num_workers == num_workers and p.num_steps >= 3}
        return by_rank if len(by_rank) == num_workers else None

    return job.wait_until(look, f"profiles of {num_workers} workers")


@pytest.mark.parametrize("with_tables", [False, True])
def test_worker_that_waits_for_another_reports_how_long(with_tables: bool, make_job: MakeJob, client: EtcdClient) -> None:
    settings = Profiled(with_tables)
    job = make_job(settings, script=train_profiled)
    job.start_all(2)
    fast, slow = (profiles_of(job, client, 2)[rank] for rank in range(2))
    waits_s = settings.slow_s - settings.fast_s
    assert 0.6 * waits_s < fast.communication_s < 2 * waits_s
    assert slow.communication_s < 0.6 * waits_s
    assert fast.forward_s < 0.9 * slow.forward_s
    for profile in (fast, slow):
        parts = sum(getattr(profile, f"{part}_s") for part in STEP_PARTS)
        assert parts == pytest.approx(profile.step_time_s, rel=1e-3)
        assert profile.step_time_s == pytest.approx(fast.step_time_s, rel=0.5)
        assert profile.dense_flops == DENSE_FLOPS["tables" if with_tables else "dense"]
        assert profile.embedding_bytes == (TABLE_BYTES if with_tables else 0)
        assert profile.lookups_per_sample == (LOOKUPS if with_tables else 0)
        assert (profile.loader_workers, profile.prefetch_factor, profile.intra_op_threads) == (1, 2, 1)
        assert (profile.num_nodes, profile.fullest_node, profile.emptiest_node) == (1, 2, 2)
        assert 50 * MIB < profile.memory_bytes <= profile.peak_memory_bytes < profile.memory_limit_bytes
