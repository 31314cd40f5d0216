"""`dlrover data`: show the progress of a job's streams, the rows of a step, and the steps that train a row."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.cli.lookup import find_place
from lightning_dlrover.output import counted, show
from lightning_dlrover.rdzv.etcd.types import EtcdError
from lightning_dlrover.rdzv.job.journal import Journal, readable_folder
from lightning_dlrover.report.status import EVENTS_FILE, JobNotFoundError, connect, read_event_file, read_job
from lightning_dlrover.report.streams import (
    ReadStreams,
    SkippedRows,
    Standing,
    described,
    described_skipped,
    guarantee,
    read_streams,
    shown_ranges,
    skipped_rows,
    standing,
)
from lightning_dlrover.tuning.samples import StepProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_dlrover.data.lineage import Lineage
    from lightning_dlrover.rdzv.job.events import StreamOpened
    from lightning_dlrover.rdzv.job.records import EventRecord

MAX_EPOCHS = 20
"""Number of newest epochs that are searched for a row."""

MAX_FILES = 10
"""Maximum number of files with skipped rows in the readable output."""


def data_command(options: argparse.Namespace) -> int:
    """Show the streams of a job's newest fit, the rows of one step, or the steps of one row."""
    from lightning_dlrover.data.source import DataError

    found, where, events, max_epochs = _read(options)
    try:
        if options.step is not None:
            answer = [_step(stream, found, where, options, max_epochs) for stream in found.streams]
            text = "\n".join(map(_step_text, answer))
        elif options.row is not None:
            answer = _row(found, where, options)
            text = "\n".join(map(_row_text, answer))
        else:
            answer = [_progress(each, found, where, options) | _skipped(skipped_rows(events, each)) for each in found.streams]
            text = "\n".join(map(_progress_text, answer))
    except DataError as error:
        raise UsageError(f"job {options.job!r}: {error}") from error
    show(json.dumps({"run_id": options.job, "streams": answer}, indent=2) if options.json else text)
    return EXIT_OK


def _read(options: argparse.Namespace) -> tuple[ReadStreams, Standing | None, Sequence[EventRecord], int | None]:
    """Return the streams of a job, its position, its history and its last epoch, from etcd, else from its run folder."""
    events: list[EventRecord] = []
    profiles: list[StepProfile] = []
    is_training, max_epochs = False, None
    try:
        place = find_place(options.job, options)
        with connect(place, timeout_s=2.0) as client:
            job = read_job(client, place.keys)
            view, max_epochs = job.view, job.progress.max_epochs if job.progress is not None else None
            events = Journal(client, place.keys).events()
            profiles = list(readable_folder(client, StepProfile, place.keys.profiles).values())
            is_training = view.job is not None and view.job.phase == "training" and bool(view.workers)
    except (EtcdError, JobNotFoundError):
        if options.endpoint:
            raise
    found = read_streams(events)
    if found is None:  # etcd keeps the newest lines of a history, the run folder all of them
        file = options.run_dir / options.job / EVENTS_FILE
        events = read_event_file(file) if file.exists() or not events else events
        found = read_streams(events)
    if found is None:
        raise UsageError(
            f"job {options.job!r} reads no stream, or its training has not begun: this command shows what "
            "lightning_dlrover.data.stream(...) has read in a DataLoader of the job. Rows of an IterableDataset are not listed"
        )
    return found, standing(found, profiles, events, time.time(), is_training), events, max_epochs


def _lineage(stream: StreamOpened, options: argparse.Namespace) -> Lineage:
    from lightning_dlrover.data.lineage import Lineage, listed_shards

    return Lineage(stream, listed_shards(stream, options.files))


def _progress(stream: StreamOpened, found: ReadStreams, where: Standing | None, options: argparse.Namespace) -> dict[str, Any]:
    from lightning_dlrover.data.lineage import Lineage
    from lightning_dlrover.data.source import DataError

    problem = ""
    try:
        lineage = _lineage(stream, options)
    except DataError as error:
        if options.files:
            raise
        lineage, problem = Lineage(stream), str(error)
    answer: dict[str, Any] = {
        "source": stream.source,
        "text": described(stream),
        "guarantee": guarantee(stream),
        "num_files": stream.num_shards,
        "num_rows": stream.num_rows,
        "has_finished": found.finished_step is not None,
        "files_problem": problem,
        "epoch": None,
    }
    if where is None:
        return answer
    epoch, batches = lineage.place_in_epoch(where.batches, found.finished_step is not None)
    files = lineage.files_progress(epoch, batches)
    rate = where.batches_per_s if found.finished_step is None else None
    return answer | {
        "epoch": epoch,
        "batches_done": batches,
        "num_batches": stream.epoch_batches,
        "rows_done": lineage.rows_done(batches),
        "files_done": files.done if files else None,
        "files_in_work": files.in_work if files else None,
        "files_left": files.left if files else None,
        "rows_per_s": rate * stream.batch_size if rate else None,
        "epoch_left_s": (stream.epoch_batches - batches) / rate if rate else None,
        "measured_s_ago": where.age_s,
        "wait_skew": dataclasses.asdict(where.skew) if where.skew is not None else None,
    }


def _skipped(skipped: SkippedRows) -> dict[str, Any]:
    return {
        "rows_skipped": skipped.num_rows,
        "all_skipped_are_known": skipped.is_complete,
        "skipped_text": described_skipped(skipped),
        "skipped": [dataclasses.asdict(each) for each in skipped.files],
    }


def _skipped_lines(answer: dict[str, Any]) -> list[str]:
    lines = [f"  {answer['skipped_text']}"] if answer["skipped_text"] else []
    for each in answer["skipped"][:MAX_FILES]:
        lines.append(f"    {each['file']}: rows {shown_ranges(each['ranges'])}: {each['reason']}")
    more = len(answer["skipped"]) - MAX_FILES
    return lines + ([f"    and {more} more files"] if more > 0 else [])


def _progress_text(answer: dict[str, Any]) -> str:
    lines = [answer["text"]]
    line = "  position: not measured yet; DLRoverCallback in the Trainer's callbacks measures it"
    if answer["epoch"] is not None:
        share = 100 * answer["rows_done"] / max(1, answer["num_rows"])
        line = f"  epoch {answer['epoch']}: {answer['rows_done']} of {answer['num_rows']} rows ({share:.0f} %)"
        if answer["files_done"] is not None:
            line += f", files: {answer['files_done']} done, {answer['files_in_work']} in progress, {answer['files_left']} left"
    lines.append(line)
    if answer.get("rows_per_s"):
        age = f"; at the rate measured {answer['measured_s_ago']:.0f} s ago" if answer["measured_s_ago"] >= 1 else ""
        lines.append(f"  {answer['rows_per_s']:.0f} rows/s, {answer['epoch_left_s']:.0f} s left of the epoch{age}")
    if skew := answer.get("wait_skew"):
        lines.append(
            f"  a step waits {1e3 * skew['longest_s']:.1f} ms for data on worker {skew['worker_id']}, and "
            f"{1e3 * skew['median_s']:.1f} ms in the median of {skew['num_workers']} workers"
        )
    lines += _skipped_lines(answer)
    if answer["has_finished"]:
        lines.append("  training has finished")
    if answer["files_problem"]:
        lines.append(f"  files are not shown: {answer['files_problem']}")
    return "\n".join(lines)


def _step(
    stream: StreamOpened, found: ReadStreams, where: Standing | None, options: argparse.Namespace, max_epochs: int | None
) -> dict[str, Any]:
    if stream.accumulate and found.finished_step is not None and options.step > found.finished_step:
        raise UsageError(f"job {options.job!r} has finished with step {found.finished_step}: there is no step {options.step}")
    newest, stream = stream, found.window_of(stream, options.step)
    lineage = _lineage(stream, options)
    epoch, batches = lineage.batches_of_step(options.step)
    if max_epochs and epoch >= max_epochs:
        raise UsageError(
            f"job {options.job!r} trains {counted(max_epochs, 'epoch')}, and step {options.step} would be in number {epoch + 1}"
        )
    is_done = epoch < newest.epoch or (where is not None and lineage.is_done(epoch, batches[-1], where.batches))
    return {
        "source": stream.source,
        "step": options.step,
        "counts": "updates" if stream.accumulate else "batches",
        "epoch": epoch,
        "batches": list(batches),
        "is_done": is_done,
        "rows": [dataclasses.asdict(each) for each in lineage.rows_of(epoch, batches)],
    }


def _step_text(answer: dict[str, Any]) -> str:
    first, last = answer["batches"][0], answer["batches"][-1]
    batches = f"global batch {first}" if first == last else f"global batches {first} to {last}"
    num_rows = sum(last - first + 1 for each in answer["rows"] for first, last in each["ranges"])
    unit = "step" if answer["counts"] == "updates" else "batch"
    state = "done" if answer["is_done"] else "to come"
    where = f"epoch {answer['epoch']}, {batches}, {state}"
    lines = [f"{unit} {answer['step']}: {where}: {counted(num_rows, 'row')} of {answer['source']:.100}"]
    for each in answer["rows"]:
        lines.append(f"{each['file']}:" + ",".join(f"{a}-{b}" if a != b else str(a) for a, b in each["ranges"]))
    return "\n".join(lines)


def _row(found: ReadStreams, where: Standing | None, options: argparse.Namespace) -> list[dict[str, Any]]:
    from lightning_dlrover.data.source import DataError

    file, row = options.row
    answers, problems = [], []
    for stream in found.streams:
        try:
            lineage = _lineage(stream, options)
            newest = lineage.place_in_epoch(where.batches, found.finished_step is not None)[0] if where else stream.epoch
            if stream.grows:
                windows = next(each for each in found.windows if stream in each)
                places = [x for w in windows for x in _lineage(w, options).places_of(file, row, range(w.epoch, w.epoch + 1))]
            else:
                places = lineage.places_of(file, row, range(max(stream.epoch, newest - MAX_EPOCHS + 1), newest + 1))
        except DataError as error:
            problems.append(error)
            continue
        shown = []
        for each in places:
            is_done = where is not None and lineage.is_done(each.epoch, each.batch, where.batches)
            shown.append({**dataclasses.asdict(each), "is_done": is_done or each.epoch < stream.epoch})
        answers.append({"source": stream.source, "file": file, "row": row, "places": shown})
    if not answers:
        raise problems[0]
    return answers


def _row_text(answer: dict[str, Any]) -> str:
    lines = [f"{answer['file']}:{answer['row']} of {answer['source']:.100}"]
    for place in answer["places"]:
        step = f", step {place['step']}" if place["step"] is not None else ""
        state = "done" if place["is_done"] else "to come"
        lines.append(f"  epoch {place['epoch']}: global batch {place['batch']}{step}, {state}")
    if not answer["places"]:
        lines.append("  in no batch: the epochs end before it")
    return "\n".join(lines)
