"""The figures of `benchmarks/etcd_load.py`: its parts, and the bytes of revisions made by hand."""

from __future__ import annotations

import argparse
import random

import pytest
from etcd_load import parts_of
from etcd_load_bytes import Load, Moment, Revision, cost_of, revisions_of
from jobs import BenchmarkError

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import Keys
from lightning_dlrover.tuning.profile_log import FIRST_WINDOWS, PROFILES, WINDOWS

DAY_S = 86_400.0
MB = 10**6


def moment(at_s: float, revision: int) -> Moment:
    return Moment(at_s, revision, revision, 0)


def test_parts_run_in_their_usual_order_and_once_each() -> None:
    assert parts_of("world,bytes,world") == ["bytes", "world"]


@pytest.mark.parametrize("text", ["", ",", "bytes,byte"])
def test_unknown_part_is_refused_with_those_that_exist(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="bytes, workers, decisions, world"):
        parts_of(text)


def test_first_day_counts_the_start_once_and_the_rest_by_time() -> None:
    revisions = [
        Revision(1, "events/1-w0", 3 * MB),  # before the measurement
        Revision(2, "events/2-w0", MB),  # a megabyte in a quarter of a day
        Revision(3, "profiles/w0", 2 * MB),
        Revision(3, "profiles/w1", MB),
        Revision(4, "live/agents/a0", MB),
        Revision(9, "profiles/w1", 99 * MB),  # after it
    ]
    load = Load(moment(0.0, 0), [moment(100.0, 1), moment(100.0 + DAY_S / 4, 5)], revisions)
    assert load.job_mb_per_day == pytest.approx(3 + 4)
    assert load.own_mb_per_day == pytest.approx(8 + 4)  # the worker that writes most, and an agent
    assert load.mb_per_worker_day == pytest.approx(7 + 12)


def test_burst_of_seconds_is_not_extrapolated_beyond_the_allowance_unless_it_broke_it() -> None:
    began, ended = moment(0.0, 0), moment(20.0, 9)
    within, beyond = Revision(1, "profiles/w0", 3000), Revision(1, "profiles/w0", 30_000)
    assert Load(began, [began, ended], [within]).own_mb_per_day == PROFILES.within(DAY_S) / MB
    assert Load(began, [began, ended], [beyond]).own_mb_per_day == pytest.approx(0.03 * DAY_S / 20)


def test_time_around_a_lost_worker_does_not_count() -> None:
    slices = [moment(100.0 * number, number) for number in range(9)]
    lost = Revision(3, "live/workers/w0", 100, removes=True)
    noise = [Revision(number, "store/1", 1000) for number in (2, 4, 8)]
    load = Load(slices[0], slices, [lost, *noise])
    assert load.mb_per_worker_day == pytest.approx(2000 / MB * DAY_S / 600)


def test_job_that_was_disturbed_most_of_the_time_gives_no_figure() -> None:
    slices = [moment(100.0 * number, number) for number in range(9)]
    with pytest.raises(BenchmarkError, match="in or before 6 of 8 slices"):
        Load(slices[0], slices, [Revision(number, "live/shared/round", 100) for number in (2, 4, 6)])


def test_key_counts_for_its_worker_and_in_the_row_of_its_folder() -> None:
    own, history, plan = (Revision(1, key, 1) for key in ("profiles/w0", "events/1-w0", "live/shared/plan"))
    assert (own.owner, own.folder) == ("w0", "profiles/")
    assert (history.owner, history.folder) == ("", "events/")
    assert (plan.owner, plan.folder) == ("", "live/shared/plan")


def test_superseded_and_removed_values_are_counted_from_the_first_one(private_etcd: EmbeddedEtcd, keys: Keys) -> None:
    """A server that others use, too, has compacted the first revisions after some minutes."""
    with EtcdClient(EtcdConfig(private_etcd.endpoint)) as client:
        client.put(keys.plan, b"x" * 1000)
        client.put(keys.plan, b"y" * 2000)
        client.delete(keys.plan)
        client.put("/another/job", b"z")
        first, second, removed = revisions_of(client, keys.root)
    assert {each.key for each in (first, second, removed)} == {"live/shared/plan"}
    assert 1000 + len(keys.plan) < first.num_bytes < 1000 + len(keys.plan) + 80
    assert second.num_bytes - first.num_bytes == pytest.approx(1000, abs=5)
    assert len(keys.plan) < removed.num_bytes < len(keys.plan) + 80


@pytest.mark.parametrize("deviation", [0.0, 0.1, 0.5, 2.0])
def test_no_noise_costs_more_than_the_bound(deviation: float) -> None:

    profile, history = cost_of([-deviation, 0.0, deviation], hours=4, rng=random.Random(1))
    assert profile <= 6 * PROFILES.within(4 * 3600.0) / MB + 0.01
    assert history <= 6 * (WINDOWS.within(4 * 3600.0) + FIRST_WINDOWS.within(4 * 3600.0)) / MB
