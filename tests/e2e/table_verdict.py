"""Judge jobs with sharded tables by comparing them with an undisturbed run of one worker."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lightning_dlrover.live.order import epoch_order
from lightning_dlrover.rdzv.job.folders import ROOT, short
from lightning_dlrover.rdzv.job.records import DEFAULT_PREFIX
from tests.e2e.harness import Job, Record
from tests.e2e.table_job import NUM_ROWS, TableSettings, train_tables
from tests.e2e.toy_job import SEED

TOLERANCE = 1e-3
"""Relative tolerance of losses. Worlds of different sizes add in a different order."""

_REFERENCES: dict[TableSettings, Job] = {}


def undisturbed(make_job: Callable[..., Job], settings: TableSettings) -> Job:
    """Finished job of one worker, run once for all settings that compute the same."""
    same = replace(
        settings,
        step_s=0.0,
        slow="",
        snapshot_s=0.0,
        replicas=1,
        max_bytes=None,
        save_at=None,
        ckpt_path=None,
        stale_s=300.0,
        apart=False,
    )  # these settings do not change the result
    if same not in _REFERENCES:
        job = make_job(same, script=train_tables)
        job.start()
        assert job.finish() == [0], job.report()
        job.records()  # cache the records
        _REFERENCES[same] = job
    return _REFERENCES[same]


def steps_that_count(job: Job) -> dict[int, list[Record]]:
    """Records of every step in the last round that made it. Earlier attempts were rolled back."""
    by_step: dict[int, list[Record]] = defaultdict(list)
    for record in job.records("done"):
        by_step[record["step"]].append(record)
    return {step: [r for r in rs if r["round"] == max(o["round"] for o in rs)] for step, rs in by_step.items()}


def mean_loss(records: list[Record]) -> float:
    return float(sum(r["loss"] * r["weight"] for r in records) / sum(r["weight"] for r in records))


def judge(job: Job, settings: TableSettings, reference: Job, after: int = 0, read_at: int = 0) -> list[str]:
    """Problems found in a finished job. Empty if each step used its samples once and had the loss of the undisturbed run.

    Args:
        after: step at which the job began, from a checkpoint.
        read_at: step of a checkpoint that the job resumed from. Lightning does not save the values logged in its epoch.
    """
    bad: list[str] = []
    found = steps_that_count(job)
    expected = {step: records for step, records in steps_that_count(reference).items() if step > after}
    if sorted(found) != sorted(expected):
        bad.append(f"steps {sorted(set(expected) - set(found))} are missing, {sorted(set(found) - set(expected))} are too many")
    shares = defaultdict(list)
    for r in job.records("share"):
        shares[r["epoch"], r["batch"], r["round"]].append(r)
    for step, records in sorted(found.items()):
        epoch, batch = divmod(step - 1, settings.batches_per_epoch)
        order = epoch_order(settings.num_rows, True, SEED, epoch).tolist()
        samples = order[batch * settings.batch_size : (batch + 1) * settings.batch_size]
        trained = {i for r in shares[epoch, batch, records[0]["round"]] for i in r["ids"]}
        if trained != set(samples):
            bad.append(f"step {step}: trained on {sorted(trained)} instead of {sorted(samples)}")
        if len({r["parameters"] for r in records}) > 1:
            bad.append(f"step {step}: dense parameters differ between workers")
        if len(records) == records[0]["world"] and step in expected:
            here, there = mean_loss(records), mean_loss(expected[step])
            if abs(here - there) > TOLERANCE * abs(there) + 1e-5:
                bad.append(f"step {step}: loss {here:.6f}, {there:.6f} in the undisturbed run")
    for record in job.records("epoch_done"):
        epoch_of = next(r for r in reference.records("epoch_done") if r["epoch"] == record["epoch"])
        first = record["epoch"] * settings.batches_per_epoch
        whole = not first < max(after, read_at) < first + settings.batches_per_epoch
        if whole and abs(record["mean_loss"] - epoch_of["mean_loss"]) > TOLERANCE * abs(epoch_of["mean_loss"]):
            bad.append(
                f"epoch {record['epoch']}, rank {record['rank']} of {record['world']}: mean loss {record['mean_loss']:.6f}, "
                f"{epoch_of['mean_loss']:.6f} in the undisturbed run"
            )
    return [
        *bad,
        *_bad_tables(job, reference),
        *_bad_growing(job, reference),
        # The number of batches of validation depends on that of the workers.
        *([] if settings.num_val_rows else _bad_counters(job, reference)),
        *_bad_validation(job, settings, reference, after),
    ]


def _bad_counters(job: Job, reference: Job) -> list[str]:
    """Problems with the steps that the tables' kernels have counted, batches of validation included."""
    expected = {table: n for r in reference.records("tables") if r["when"] == "end" for table, n in r["counters"].items()}
    return [
        f"rank {record['rank']}: table {table} counts {number} steps, {expected[table]} in the undisturbed run"
        for record in job.records("tables")
        if record["when"] == "end"
        for table, number in record["counters"].items()
        if number != expected[table]
    ]


def assembled(job: Job, when: str, settings: TableSettings) -> dict[str, Tensor]:
    """All tables and optimizer states at the time, assembled from all workers; NaN where no worker had any values.

    A row-wise state is expanded to one column for each of the table's. The column of a shard holds for all its columns.
    """
    records = [r for r in job.records("tables") if r["when"] == when]
    found: dict[str, Tensor] = {}
    for record in (r for r in records if r["round"] == max(o["round"] for o in records)):
        for block in record["blocks"]:
            row0, row1, col0, col1 = block["region"]
            values = torch.tensor(block["values"], dtype=torch.float32)
            number = int(block["name"].split(".t")[1][0])
            table = found.setdefault(block["name"], torch.full((NUM_ROWS[number], 8), torch.nan))
            table[row0:row1, col0:col1] = values if values.dim() == 2 else values[:, None]
    return found


def _bad_tables(job: Job, reference: Job) -> list[str]:
    bad = []
    settings: TableSettings = reference._settings
    expected = assembled(reference, "end", settings)
    found = assembled(job, "end", settings)
    if found.keys() != expected.keys():
        return [f"at the end there were {sorted(found)} instead of {sorted(expected)}"]
    for name, table in found.items():
        worst = float((table - expected[name]).abs().max() / expected[name].abs().max())
        if not worst < 0.01:
            bad.append(f"{name} at the end differs by {worst:.4f} of its largest value from the undisturbed run's")
    return bad


def _bad_growing(job: Job, reference: Job) -> list[str]:
    """Problems with growing tables at the end: a row that is missing, in two places, or has other values."""
    bad = []
    expected, found = _grown(reference), _grown(job)
    for table, rows in expected.items():
        ids = [id_ for id_, _ in found.get(table, [])]
        if sorted(ids) != sorted(id_ for id_, _ in rows):
            bad.append(f"{table} has {len(ids)} rows at the end ({len(set(ids))} ids) instead of {len(rows)}")
            continue
        here, there = (torch.tensor([values for _, values in sorted(each)]) for each in (found[table], rows))
        worst = float((here - there).abs().max() / there.abs().max())
        if not worst < 0.01:
            bad.append(f"{table} at the end differs by {worst:.4f} of its largest value from the undisturbed run's")
    return bad


def _grown(job: Job) -> dict[str, list[tuple[str, list[float]]]]:
    """Ids and rows of all growing tables at the end, from all workers."""
    records = [r for r in job.records("tables") if r["when"] == "end"]
    found: dict[str, list[tuple[str, list[float]]]] = defaultdict(list)
    for record in (r for r in records if r["round"] == max(o["round"] for o in records)):
        for table, rows in record["grown"].items():
            found[table] += rows.items()
    return found


def _bad_validation(job: Job, settings: TableSettings, reference: Job, after: int) -> list[str]:
    """Every validation run ends on at least one worker, with the metric of the undisturbed run."""
    bad = []
    expected = {r["step"]: r["metric"] for r in reference.records("val_done") if r["step"] > after}
    found = {r["step"]: r for r in sorted(job.records("val_done"), key=lambda r: int(r["round"]))}
    if found.keys() != expected.keys():
        bad.append(f"validated at steps {sorted(found)} instead of {sorted(expected)}")
    for step in found.keys() & expected.keys():
        if abs(found[step]["metric"] - expected[step]) > TOLERANCE * abs(expected[step]):
            bad.append(f"validation at step {step}: {found[step]['metric']:.6f} instead of {expected[step]:.6f}")
    return bad


def shared_memory_of(job: Job) -> list[Path]:
    """Folders of the job's snapshots."""
    base = ROOT / f"dlrover-{os.getuid()}"
    return sorted(base.glob(f"{short(f'{DEFAULT_PREFIX}/{job.run_id}')}-*"))


def lose_shared_memory_of(job: Job) -> None:
    """Delete the job's shared memory, as a restart of the host would."""
    for folder in shared_memory_of(job):
        shutil.rmtree(folder, ignore_errors=True)
