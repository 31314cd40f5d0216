"""How jobs with sharded tables are judged: by the run of one worker that nothing happened to."""

from __future__ import annotations

from collections import defaultdict

from harness import Job, Record
from table_job import TableSettings
from toy_job import SEED

from lightning_dlrover.sampler import epoch_order

__all__ = ["judge", "steps_that_count"]


def steps_that_count(job: Job) -> dict[int, list[Record]]:
    """What was recorded of every step in the last round in which it was done: earlier ones were rolled back."""
    by_step: dict[int, list[Record]] = defaultdict(list)
    for record in job.records("done"):
        by_step[record["step"]].append(record)
    return {step: [r for r in rs if r["round"] == max(o["round"] for o in rs)] for step, rs in by_step.items()}


def mean_loss(records: list[Record]) -> float:
    return sum(r["loss"] * r["weight"] for r in records) / sum(r["weight"] for r in records)


def judge(job: Job, settings: TableSettings, reference: Job) -> list[str]:
    """What went wrong in a finished job; empty if each step saw its samples once and had the loss of the undisturbed run."""
    bad: list[str] = []
    found, expected = steps_that_count(job), steps_that_count(reference)
    if sorted(found) != sorted(expected):
        bad.append(f"steps {sorted(set(expected) - set(found))} are missing, {sorted(set(found) - set(expected))} are too many")
    for step, records in sorted(found.items()):
        epoch, batch = divmod(step - 1, settings.batches_per_epoch)
        order = epoch_order(settings.num_rows, True, SEED, epoch).tolist()
        samples = order[batch * settings.batch_size : (batch + 1) * settings.batch_size]
        shares = [
            r for r in job.records("share") if (r["epoch"], r["batch"], r["round"]) == (epoch, batch, records[0]["round"])
        ]
        trained = {i for r in shares for i in r["ids"]}
        if trained != set(samples):
            bad.append(f"step {step}: trained on {sorted(trained)} instead of {sorted(samples)}")
        if len({r["parameters"] for r in records}) > 1:
            bad.append(f"step {step}: dense parameters differ between workers")
        if len(records) == records[0]["world"] and step in expected:
            here, there = mean_loss(records), mean_loss(expected[step])
            if abs(here - there) > 1e-3 * abs(there) + 1e-5:
                bad.append(f"step {step}: loss {here:.6f}, {there:.6f} in the undisturbed run")
    for record in job.records("epoch_done"):
        there = next(r["mean_loss"] for r in reference.records("epoch_done") if r["epoch"] == record["epoch"])
        if record["rank"] == 0 and abs(record["mean_loss"] - there) > 1e-3 * abs(there):
            bad.append(f"epoch {record['epoch']}: mean loss {record['mean_loss']:.6f}, {there:.6f} in the undisturbed run")
    return bad
