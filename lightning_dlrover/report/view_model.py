"""The picture of a job that every screen draws: `dlrover top`, the web page and `/metrics`.

`JobRecords` takes a job's records as etcd holds them, in any order and as they change, and decodes each version once.
`JobRecords.shown` turns them into a `ShownJob`: immutable, free of control characters, bounded in size, and ready for JSON. It
depends only on the records and on the time that it is given. `watcher.py` supplies the records.

Times are seconds since the epoch, by the clocks of the hosts that wrote them; 0 means unknown.
"""

from __future__ import annotations

import bisect
import unicodedata
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from typing import Any, Literal

from lightning_dlrover.codec import RecordError
from lightning_dlrover.rdzv.etcd.types import KeyValue
from lightning_dlrover.rdzv.job import events as kinds
from lightning_dlrover.rdzv.job.journal import readable
from lightning_dlrover.rdzv.job.records import (
    AddressRecord,
    AgentRecord,
    ControllerRecord,
    DrainRecord,
    EventRecord,
    JobRecord,
    Keys,
    NodeRecord,
    NodesRecord,
    PlanRecord,
    ProgressRecord,
    RoundRecord,
    SnapshotRecord,
    StacksRecord,
    WorkerRecord,
    decode,
)
from lightning_dlrover.rdzv.membership import rounds
from lightning_dlrover.report.status import ended_how, joiners
from lightning_dlrover.report.streams import described, described_iterable, read_iterables, read_streams, skipped_rows, standing
from lightning_dlrover.report.timeline import Profile, TimeLedger, profile_of
from lightning_dlrover.tuning.plan import Decision, Outcome, outcome
from lightning_dlrover.tuning.samples import StepProfile

MAX_POINTS = 240  # points of a job's series
MAX_EVENTS = 200  # newest events of a job
MAX_ROUNDS = 100  # newest rounds of a job
MAX_WINDOWS = 4000  # newest measured windows that a series and the goodput are computed from
MAX_NAMED_WAITS = 100  # workers up to which the reason of each wait is computed: its cost grows with their square
STALE_S = 180.0  # age of a progress record above which its estimate of the remaining time is dropped
FIRST_STEPS = 20  # steps before which an estimate of the remaining time would mislead

# Text from records. Anyone who can write to etcd chooses it, so it is cleaned here, and nowhere else.

MAX_TEXT = 500
"""Characters of a text that are shown."""


def clean(text: str, most: int = MAX_TEXT) -> str:
    """Return `text` in one line without characters that control a screen, and cut to `most` characters.

    Control characters, marks that reorder text, unpaired surrogates and other invisible characters are replaced by a space.
    Markup, such as HTML, is kept: each screen must treat it as text.
    """
    if len(text) > most:
        text = text[: most - 1] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else " " for c in text).rstrip()


class Shown:
    """Base of all parts of a picture: their texts are clean, whoever made them."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if type(value) is str and (len(value) > MAX_TEXT or not value.isprintable()):
                object.__setattr__(self, each.name, clean(value))


@dataclass(frozen=True)
class StepParts(Shown):
    """Seconds of a step by purpose; they add up to the step."""

    compute_s: float = 0.0  # forward, backward and optimizer
    data_s: float = 0.0  # waits for the loader
    wait_s: float = 0.0  # waits for slower workers; 0 in a series, where `comm_s` includes it
    comm_s: float = 0.0  # exchange of gradients
    other_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.compute_s + self.data_s + self.wait_s + self.comm_s + self.other_s


@dataclass(frozen=True)
class Point(Shown):
    """One point of a job's series."""

    at: float
    samples_per_s: float
    num_workers: int
    parts: StepParts | None = None  # None: only the rate was recorded


@dataclass(frozen=True)
class ShownWorker(Shown):
    """A worker, by its record and its newest window of steps. Figures are None if it has published no window yet."""

    worker_id: str
    rank: int | None  # None: it is not a member of the round
    state: str  # starting, standby, ready, active, reforming, leaving or gone
    node: str
    host: str
    pid: int
    since: float  # start of this state
    waits: str = ""  # reason for its wait
    samples: int | None = None  # its share of a global batch
    own_s: float | None = None  # seconds of a step that it works itself
    slow_factor: float | None = None  # `own_s` relative to the median of the round
    parts: StepParts | None = None
    device: str = ""
    memory_bytes: int | None = None
    peak_memory_bytes: int | None = None
    memory_limit_bytes: int | None = None  # None: no limit is known
    full_at: float | None = None  # when its memory will reach the limit, as it has forecast; None: it does not grow
    gpu_memory_bytes: int | None = None
    gpu_limit_bytes: int | None = None
    gpu_percent: float | None = None
    cpu_percent: float | None = None
    intra_op_threads: int | None = None
    loader_workers: int | None = None
    measured_at: float | None = None


@dataclass(frozen=True)
class ShownJoiner(Shown):
    node: str
    stage: str  # requested, starting, importing, building or ready
    since: float


@dataclass(frozen=True)
class ShownRound(Shown):
    number: int
    at: float
    kind: str  # `RoundRecord.kind`
    num_workers: int
    reason: str
    stall_s: float | None = None  # pause of the job for it; None: not measured


@dataclass(frozen=True)
class ShownEvent(Shown):
    at: float
    kind: str
    text: str


@dataclass(frozen=True)
class ShownProgress(Shown):
    step: int
    epoch: int  # first epoch: 0
    batch: int
    at: float
    max_epochs: int | None = None
    num_batches: int | None = None
    percent: float | None = None  # of all epochs; None: their number, or that of their batches, is unknown
    seconds_left: float | None = None  # None: unknown, too early to tell, or the record is stale
    loss: str = ""


@dataclass(frozen=True)
class ShownPlan(Shown):
    num_workers: int
    owner: str  # planner, user or pool
    reason: str
    is_binding: bool
    at: float
    settings: Mapping[str, int] = field(default_factory=dict)  # of each worker, by name


@dataclass(frozen=True)
class Prediction(Shown):
    """The newest decision that was measured: what it predicted, and what came."""

    decision_id: int
    settings: str
    step_s: float
    low_s: float
    high_s: float
    measured_s: float
    is_inside: bool
    reason: str


@dataclass(frozen=True)
class SizePrediction(Shown):
    """Throughput at one number of workers, as the newest decision of the planner predicts it."""

    num_workers: int
    samples_per_s: float
    low_per_s: float
    high_per_s: float
    is_measured: bool
    cost_per_hour: float | None = None


@dataclass(frozen=True)
class ShownSnapshot(Shown):
    """The newest snapshot of sharded tables, and the newest failure of one."""

    batch: int | None
    at: float | None
    failure: str = ""  # empty: none has failed, or later ones succeeded


@dataclass(frozen=True)
class ShownStream(Shown):
    text: str
    epoch: int | None = None
    rows_done: int | None = None  # of this epoch; None: not measured
    num_rows: int | None = None  # rows of an epoch
    rows_per_s: float | None = None
    rows_skipped: int = 0


@dataclass(frozen=True)
class ShownJob(Shown):
    """One job."""

    run_id: str
    state: str  # waiting, starting, training, stopped, finished, failed, cancelled, interrupted or ended
    at: float  # time that the picture was made for
    message: str = ""  # reason for a failure
    newest_at: float = 0.0  # time of the newest record
    started_at: float = 0.0
    num_workers: int = 0  # living members of the round
    wanted_workers: int | None = None
    min_workers: int | None = None
    max_workers: int | None = None
    workers_per_node: int = 1
    listed_sizes: tuple[int, ...] = ()  # numbers of workers that may be requested, within the limits; empty: any
    global_batch_size: int | None = None
    target: str = ""  # place where nodes run
    controller: str = ""
    held_up: str = ""  # reason why planned nodes are not added
    progress: ShownProgress | None = None
    samples_per_s: float | None = None
    parts: StepParts | None = None  # mean of the round's workers
    series: tuple[Point, ...] = ()
    workers: tuple[ShownWorker, ...] = ()  # the round's members by rank, then others
    joiners: tuple[ShownJoiner, ...] = ()
    rounds: tuple[ShownRound, ...] = ()
    events: tuple[ShownEvent, ...] = ()  # newest last
    plan: ShownPlan | None = None
    prediction: Prediction | None = None
    sizes: tuple[SizePrediction, ...] = ()  # ascending
    num_rounds: int = 0
    num_losses: int = 0  # workers that were lost
    stall_s: float = 0.0  # all measured pauses together
    # Time in steps that counted, over wall time, since the start or since the oldest event that is left. None: not measured.
    goodput: float | None = None
    goodput_until: float | None = None  # end of the newest window that `goodput` includes
    snapshot: ShownSnapshot | None = None
    streams: tuple[ShownStream, ...] = ()
    problems: tuple[str, ...] = ()  # unreadable records

    @property
    def is_over(self) -> bool:
        return self.state not in ("waiting", "starting", "training")

    @property
    def last_event(self) -> str:
        return next((event.text for event in reversed(self.events) if event.text), "")

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, dicts, texts and numbers."""
        return asdict(self)


# The records of a job, each decoded once.

_SINGLE: dict[str, type[Any]] = {
    "job": JobRecord,
    "round": RoundRecord,
    "plan": PlanRecord,
    "controller": ControllerRecord,
    "nodes": NodesRecord,
    "snapshot": SnapshotRecord,
    "progress": ProgressRecord,
}
_FOLDERS: dict[str, type[Any]] = {
    "workers": WorkerRecord,
    "addresses": AddressRecord,
    "agents": AgentRecord,
    "drains": DrainRecord,
    "each_node": NodeRecord,
    "profiles": StepProfile,
    "stacks": StacksRecord,
}


class JobRecords:
    """The newest records of one job, and what its events amount to. For use by one thread at a time."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.version = 0  # number of changes so far
        self.is_partial = False  # only the newest events were given; there is no goodput then
        keys = Keys(run_id, "")
        self._single = {getattr(keys, name).removeprefix(keys.root): name for name in _SINGLE}
        self._folders = {getattr(keys, name).removeprefix(keys.root): name for name in _FOLDERS}
        self._records: dict[str, Any] = {}
        self._in_folder: dict[str, dict[str, Any]] = {name: {} for name in _FOLDERS}
        self._problems: dict[str, str] = {}
        self._event_paths: dict[str, None] = {}  # events that were read
        self._history = _History()
        self._view: rounds.JobView | None = None  # of the present records; None: to be made
        self._pictures: dict[str, tuple[tuple[Any, ...], ShownWorker]] = {}  # each worker's picture, and what it was made of

    def put(self, path: str, value: bytes) -> None:
        """Take a record that was written.

        Args:
            path: the key without the job's root, such as `live/shared/job`.
        """
        self.version += 1
        folder, _, name = path.rpartition("/")
        if folder == "events":
            if name not in self._event_paths:  # a line never changes
                self._event_paths[name] = None
                if (event := _readable(EventRecord, path, value)) is not None:
                    self._history.add(event)
        elif (single := self._single.get(path)) is not None:
            self._put(self._records, single, _SINGLE[single], path, value)
            if single == "progress" and isinstance(record := self._records.get(single), ProgressRecord):
                self._history.add_progress(record)
        elif (kind := self._folders.get(folder + "/")) is not None:
            self._put(self._in_folder[kind], name, _FOLDERS[kind], path, value)

    def remove(self, path: str) -> None:
        """Take note of a deleted key. Deleted events stay in the history: etcd holds the newest ones only."""
        self.version += 1
        folder, _, name = path.rpartition("/")
        if folder == "events":
            self._event_paths.pop(name, None)
        self._problems.pop(path, None)
        if (single := self._single.get(path)) is not None:
            self._records.pop(single, None)
        elif (kind := self._folders.get(folder + "/")) is not None:
            self._in_folder[kind].pop(name, None)
        self._view = None

    def retain(self, paths: Iterable[str]) -> None:
        """Take note that the job has these keys only, after some changes may have been missed."""
        kept = set(paths)
        for path, single in self._single.items():
            if single in self._records and path not in kept:
                self.remove(path)
        for folder, kind in self._folders.items():
            for name in [name for name in self._in_folder[kind] if folder + name not in kept]:
                self.remove(folder + name)

    def add_events(self, events: Iterable[EventRecord]) -> None:
        """Take events from a run folder."""
        for event in events:
            self.version += 1
            self._history.add(event)

    @property
    def num_events(self) -> int:
        return len(self._event_paths)

    @property
    def has_no_key(self) -> bool:
        """Whether etcd holds nothing of the job any more."""
        return not self._records and not self._event_paths and not any(self._in_folder.values())

    @property
    def is_empty(self) -> bool:
        return not self._records and not any(self._in_folder.values()) and not self._history.events

    def stacks(self, worker_id: str) -> StacksRecord | None:
        """Return the newest stack traces of a worker."""
        found = self._in_folder["stacks"].get(worker_id)
        return found if isinstance(found, StacksRecord) else None

    def _put(self, where: dict[str, Any], name: str, record_type: type[Any], path: str, value: bytes) -> None:
        self._view = None
        try:
            where[name] = decode(record_type, value, path)
            self._problems.pop(path, None)
        except RecordError as error:  # the last readable version stays
            self._problems[path] = str(error)

    def membership(self) -> rounds.JobView:
        """Return the membership of the job."""
        if self._view is None:
            drains: dict[str, DrainRecord] = self._in_folder["drains"]
            workers = self._in_folder["workers"]
            self._view = rounds.JobView(
                job=self._records.get("job"),
                round=self._records.get("round"),
                plan=self._records.get("plan"),
                workers=dict(workers),
                agents=dict(self._in_folder["agents"]),
                addresses=dict(self._in_folder["addresses"]),
                drains=frozenset(worker for worker, record in drains.items() if not record.once_replaced),
                replacements=frozenset(w for w, record in drains.items() if record.once_replaced and w in workers),
            ).with_requests_to_nodes()
        return self._view

    def shown(self, now: float) -> ShownJob:
        """Return the picture of the job.

        Args:
            now: seconds since the epoch.
        """
        view, history = self.membership(), self._history
        job, round_, plan = view.job, view.round, view.plan
        controller: ControllerRecord | None = self._records.get("controller")
        nodes: NodesRecord | None = self._records.get("nodes")
        progress: ProgressRecord | None = self._records.get("progress")
        state = self._state(view)
        is_over = state not in ("waiting", "starting", "training")
        workers = self._workers(view, history)
        measured = [each.parts for each in workers if each.rank is not None and each.parts is not None]
        windows = history.windows_by_time()
        begin = (job.created_at if job else 0.0) if history.has_begin else 0.0
        goodput, until = (None, None) if self.is_partial else goodput_of(windows, begin, history.fits_finished_at)
        newest = max([history.newest_at, *(r.at for r in (progress,) if r), *(w.measured_at or 0.0 for w in workers)])
        rate = windows[-1].samples_per_s if windows else None
        if progress is not None and (not windows or progress.at >= windows[-1].at):
            rate = progress.samples_per_s
        decision = history.decision()
        return ShownJob(
            run_id=self.run_id,
            state=state,
            at=now,
            message=job.message if job and job.phase == "failed" else history.failure,
            newest_at=min(newest, now),
            started_at=(job.created_at if job else 0.0) or history.started_at,
            num_workers=0 if is_over else len(view.survivors),
            wanted_workers=plan.num_workers if plan and plan.binding else len(round_.members) if round_ else None,
            min_workers=job.min_workers if job else None,
            max_workers=job.max_workers if job else None,
            workers_per_node=job.workers_per_node if job else 1,
            listed_sizes=tuple(job.sizes) if job else (),
            global_batch_size=(job.global_batch_size or None) if job else None,
            target=nodes.target if nodes else controller.target if controller else "",
            controller=f"process {controller.pid} on {controller.host}" if controller else "",
            held_up=controller.held_up if controller else "",
            progress=_progress(progress, now, is_over) if progress else None,
            samples_per_s=None if is_over else rate,
            parts=_mean_parts(measured),
            series=_series(windows, history.rates),
            workers=workers,
            joiners=() if is_over else self._joiners(view, controller),
            rounds=history.shown_rounds(),
            events=tuple(ShownEvent(e.at, e.kind, e.text) for e in sorted(history.events, key=lambda e: e.at)),
            plan=_plan(plan) if plan else None,
            prediction=_prediction(decision, windows),
            sizes=_sizes(decision),
            num_rounds=max([len(history.rounds), round_.number if round_ else 0]),
            num_losses=len(history.losses),
            stall_s=sum(seconds for seconds, _ in history.stalls.values()),
            goodput=goodput,
            goodput_until=until,
            snapshot=self._snapshot(history),
            streams=self._streams(history, now, state == "training"),
            problems=tuple(clean(text) for text in list(self._problems.values())[:10]),
        )

    def _state(self, view: rounds.JobView) -> str:
        if view.job is None:
            if not self._records and not any(self._in_folder.values()):
                return ended_how(self._history.ending()) or "ended"  # only its run folder is left
            return "waiting"
        if view.job.phase in ("starting", "training") and not view.workers and not view.agents:
            return "stopped"  # ended from outside, with no process left to record it
        if view.job.phase == "failed" and ended_how(self._history.ending()) == "cancelled":
            return "cancelled"
        return view.job.phase

    def _joiners(self, view: rounds.JobView, controller: ControllerRecord | None) -> tuple[ShownJoiner, ...]:
        found = joiners(view, controller, self._in_folder["each_node"])
        return tuple(ShownJoiner(each.node, each.stage, each.since) for each in found)

    def _workers(self, view: rounds.JobView, history: _History) -> tuple[ShownWorker, ...]:
        members = view.round.members if view.round else []
        ranks = {worker: rank for rank, worker in enumerate(members)}
        profiles: dict[str, StepProfile] = self._in_folder["profiles"]
        number = view.round.number if view.round else 0
        in_round = [p for w in members if (p := profiles.get(w)) is not None and p.round_number == number]
        # Rounded, so that the noise of one worker does not change the pictures of all others.
        typical_s = _rounded(median(_own_s(p) for p in in_round)) if in_round else 0.0
        # The slowest worker waits for none: its time is that of the exchange alone.
        exchange_s = _rounded(min(p.communication_s for p in in_round)) if in_round else 0.0
        shares = history.shares(number)
        waits = rounds.waits(view) if len(view.workers) <= MAX_NAMED_WAITS else {}
        labels = {agent.agent_id: agent.labels.get("node", "") for agent in view.agents.values()}
        shown = []
        former, self._pictures = self._pictures, {}
        for worker, record in sorted(view.workers.items(), key=lambda each: (ranks.get(each[0], len(ranks)), each[0])):
            rank, profile = ranks.get(worker), profiles.get(worker)
            made_of = (
                *(record, profile, rank, labels.get(record.agent_id, ""), waits.get(worker, "")),
                worker in view.drains or worker in view.replacements,
                shares[rank] if shares and rank is not None and rank < len(shares) else None,
                *(typical_s, exchange_s, history.full_at.get((worker, number))),
            )
            known = former.get(worker)
            if known is None or known[0] != made_of:
                known = made_of, _worker(*made_of)
            self._pictures[worker] = known
            shown.append(known[1])
        for worker in view.lost:
            address = view.addresses.get(worker)
            shown.append(ShownWorker(worker, ranks[worker], "gone", "", address.host if address else "", 0, 0.0))
        return tuple(shown)

    def _snapshot(self, history: _History) -> ShownSnapshot | None:
        newest: SnapshotRecord | None = self._records.get("snapshot")
        if newest is None and not history.snapshot_failure:
            return None
        at, text = history.snapshot_failure or (0.0, "")
        is_over = max(history.snapshot_at, newest.at if newest else 0.0) > at
        return ShownSnapshot(newest.batch if newest else None, newest.at if newest else None, "" if is_over else text)

    def _streams(self, history: _History, now: float, is_training: bool) -> tuple[ShownStream, ...]:
        records = [*history.streams, *history.skipped]
        found = read_streams(records)
        shown: list[ShownStream] = []
        if found is not None:
            where = standing(found, self._in_folder["profiles"].values(), [*history.newest_window], now, is_training)
            for stream in found.streams:
                skipped = skipped_rows(records, stream).num_rows
                if where is None or not stream.epoch_batches:
                    shown.append(ShownStream(described(stream), num_rows=stream.num_rows, rows_skipped=skipped))
                    continue
                epoch, batches = divmod(where.batches, stream.epoch_batches)
                rate = where.batches_per_s * stream.batch_size if where.batches_per_s is not None else None
                rows = min(batches * stream.batch_size, stream.num_rows)
                shown.append(ShownStream(described(stream), stream.epoch + epoch, rows, stream.num_rows, rate, skipped))
        return (*shown, *(ShownStream(described_iterable(each)) for each in read_iterables(records)))


def _readable(record_type: type[Any], path: str, value: bytes) -> Any:
    return readable(record_type, KeyValue(path, value, 0, 0, 0, 0))


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def _own_s(profile: StepProfile) -> float:
    return max(0.0, profile.step_time_s - profile.communication_s)


def _worker(
    record: WorkerRecord,
    profile: StepProfile | None,
    rank: int | None,
    node: str,
    waits: str,
    is_leaving: bool,
    samples: int | None,
    typical_s: float,
    exchange_s: float,
    full_at: float | None,
) -> ShownWorker:
    state = "leaving" if is_leaving else record.state
    worker = ShownWorker(record.worker_id, rank, state, node, record.host, record.pid, record.since, waits, samples)
    if profile is None:
        return worker
    own_s = _own_s(profile)
    return replace(
        worker,
        samples=samples if samples is not None else profile.local_batch if rank is not None else None,
        own_s=own_s,
        slow_factor=own_s / typical_s if typical_s > 0 and rank is not None else None,
        parts=_parts_of(profile, min(exchange_s, profile.communication_s)),
        device=clean(profile.device, 40),
        memory_bytes=profile.memory_bytes,
        peak_memory_bytes=profile.peak_memory_bytes or None,
        memory_limit_bytes=profile.memory_limit_bytes or None,
        full_at=full_at,
        gpu_memory_bytes=profile.gpu_memory_bytes or None,
        gpu_limit_bytes=profile.gpu_limit_bytes or None,
        gpu_percent=profile.gpu_percent if profile.device != "cpu" else None,
        cpu_percent=profile.cpu_percent,
        intra_op_threads=profile.intra_op_threads,
        loader_workers=profile.loader_workers,
        measured_at=profile.at,
    )


def _parts_of(profile: StepProfile, exchange_s: float) -> StepParts:
    compute_s = profile.forward_s + profile.backward_s + profile.optimizer_s
    wait_s = profile.communication_s - exchange_s
    return StepParts(compute_s, profile.data_wait_s, wait_s, exchange_s, profile.other_s)


def _mean_parts(each: Sequence[StepParts]) -> StepParts | None:
    if not each:
        return None
    return StepParts(*(sum(getattr(parts, f.name) for parts in each) / len(each) for f in fields(StepParts)))


def _progress(record: ProgressRecord, now: float, is_over: bool) -> ShownProgress:
    percent = None
    if record.max_epochs and record.num_batches:
        share = (record.epoch + min(1.0, record.batch / record.num_batches)) / record.max_epochs
        percent = 100.0 * min(1.0, share)
    left_s, age_s = record.seconds_left, max(0.0, now - record.at)
    if left_s is not None:
        is_honest = not is_over and record.step >= FIRST_STEPS and age_s <= STALE_S
        left_s = max(0.0, left_s - age_s) if is_honest else None
    return ShownProgress(
        *(record.step, record.epoch, record.batch, record.at, record.max_epochs, record.num_batches, percent, left_s),
        clean(record.loss, 20),
    )


def _plan(plan: PlanRecord) -> ShownPlan:
    names = ("loader_workers", "intra_op_threads", "prefetch_factor", "node_cpus", "node_memory_mb")
    settings = {name: value for name in names if (value := getattr(plan, name)) is not None}
    return ShownPlan(plan.num_workers, plan.owner, plan.reason, plan.binding, plan.created_at, settings)


def _prediction(decision: Decision | None, windows: Sequence[Profile]) -> Prediction | None:
    """Compare the newest decision with the windows since that have its settings."""
    if decision is None:
        return None
    chosen = [w for w in windows if w.at > decision.at and w.settings == decision.chosen]
    num_steps = sum(w.num_steps for w in chosen)
    measured_s = sum(w.step_time_s * w.num_steps for w in chosen) / num_steps if num_steps else 0.0
    if measured_s <= 0:
        return None
    came: Outcome = outcome(decision, measured_s)
    choice = decision.choice
    return Prediction(
        *(decision.decision_id, decision.chosen.short, choice.step_time_s, choice.low_s, choice.high_s, measured_s),
        came.expected,
        decision.reason,
    )


def _sizes(decision: Decision | None) -> tuple[SizePrediction, ...]:
    best: dict[int, SizePrediction] = {}
    for each in decision.candidates if decision is not None else ():
        known = best.get(each.num_workers)
        if not each.feasible or each.samples_per_s <= 0 or (known and known.samples_per_s >= each.samples_per_s):
            continue
        samples = each.samples_per_s * each.step_time_s
        low = samples / each.high_s if each.high_s > 0 else each.samples_per_s
        high = samples / each.low_s if each.low_s > 0 else each.samples_per_s
        best[each.num_workers] = SizePrediction(
            each.num_workers, each.samples_per_s, low, high, each.measured, each.cost_per_hour
        )
    return tuple(best[size] for size in sorted(best))


def _series(windows: Sequence[Profile], rates: Iterable[tuple[float, float, int]]) -> tuple[Point, ...]:
    """Return the job's throughput over time, of at most `MAX_POINTS` points: every n-th, and the newest."""
    points = [Point(w.at, w.samples_per_s, w.num_workers, _window_parts(w)) for w in _thinned(windows, MAX_POINTS)]
    points += [Point(at, rate, num_workers) for at, rate, num_workers in _thinned(list(rates), MAX_POINTS)]
    return tuple(_thinned(sorted(points, key=lambda point: point.at), MAX_POINTS))


def _thinned(items: Sequence[Any], most: int) -> Sequence[Any]:
    if len(items) <= most:
        return items
    step = -(-len(items) // most)
    return items[(len(items) - 1) % step :: step]


def _window_parts(window: Profile) -> StepParts:
    part = window.part_s
    compute_s = part["forward"] + part["backward"] + part["optimizer"]
    return StepParts(compute_s, part["data_wait"], 0.0, part["communication"], part["other"])


def goodput_of(
    windows: Sequence[Profile], started_at: float, fits_finished_at: Sequence[float] = ()
) -> tuple[float | None, float | None]:
    """Return the time in steps that counted over wall time, and the time until which it was computed. None: not measured.

    Args:
        windows: rank 0's measured windows, by time.
        started_at: begin of the wall time; 0: that of the first window.
        fits_finished_at: ends of fits, ascending. A later fit counts its batches from 0 again.
    """
    if not windows:
        return None, None
    ledger, fit = TimeLedger(), 0
    ledger.begin(started_at)
    for window in windows:
        if (this_fit := bisect.bisect(fits_finished_at, window.at)) != fit:
            fit = this_fit
            ledger.finished()
        ledger.measured(window)
    split = ledger.split(windows[-1].at, progress_at=0.0)
    return (split.goodput, windows[-1].at) if split.wall_s > 0 else (None, None)


class _History:
    """What a job's events amount to, read one by one, in any order. Everything in it is bounded."""

    def __init__(self) -> None:
        self.events: deque[EventRecord] = deque(maxlen=MAX_EVENTS)
        self.newest_at = 0.0
        self.started_at = 0.0
        self.failure = ""
        self.rounds: dict[int, ShownRound] = {}
        self.stalls: dict[int, tuple[float, float]] = {}
        self.losses: dict[str, None] = {}
        self.rates: deque[tuple[float, float, int]] = deque(maxlen=4 * MAX_POINTS)  # time, samples per second, workers
        self.full_at: dict[tuple[str, int], float] = {}  # by worker and round
        self.snapshot_at = 0.0
        self.snapshot_failure: tuple[float, str] | None = None
        self.streams: deque[EventRecord] = deque(maxlen=MAX_EVENTS)
        self.skipped: deque[EventRecord] = deque(maxlen=MAX_EVENTS)
        self.newest_window: list[EventRecord] = []
        self.fits_finished_at: list[float] = []
        self.has_begin = False  # whether the job's first events are among those that were read
        self._ending: dict[str, EventRecord] = {}
        self._windows: list[Profile] = []
        self._decision: tuple[float, Any] = (0.0, None)  # time, and a document or the decision in it
        self._shares: dict[int, tuple[int, ...]] = {}

    def add(self, record: EventRecord) -> None:
        self.newest_at = max(self.newest_at, record.at)
        self.started_at = min(self.started_at or record.at, record.at)
        if record.text:
            self.events.append(record)
        try:
            self._add(record, kinds.content_of(record))
        except (KeyError, ValueError):  # RecordError is a ValueError: of another release, or foreign
            return

    def add_progress(self, record: ProgressRecord) -> None:
        self.rates.append((record.at, record.samples_per_s, record.num_workers))

    def _add(self, record: EventRecord, event: kinds.Event) -> None:
        match event:
            case kinds.RoundFormed():
                size = event.num_members or len(event.members)
                self.has_begin |= event.kind == "start"
                self.rounds[event.number] = ShownRound(event.number, record.at, event.kind, size, event.reason or record.text)
                self._keep_newest(self.rounds, MAX_ROUNDS)
                self._note_end("round", record)
            case kinds.TrainingStalled():
                self.stalls[event.round] = max((event.seconds, record.at), self.stalls.get(event.round, (0.0, 0.0)))
                self._keep_newest(self.stalls, 10 * MAX_ROUNDS)
            case kinds.WorkerLost():
                self.losses[event.worker_id] = None
            case kinds.WindowMeasured():
                window = profile_of(record.at, event.document)
                bisect.insort(self._windows, window, key=lambda each: each.at)
                if len(self._windows) > MAX_WINDOWS:
                    del self._windows[0]
                    self.has_begin = False
                if not self.newest_window or record.at >= self.newest_window[0].at:
                    self.newest_window = [record]
            case kinds.DecisionMade() if record.at >= self._decision[0]:
                self._decision = record.at, event.document
            case kinds.SharesChanged():
                self._shares[event.round] = tuple(event.samples)
                self._keep_newest(self._shares, 2)
            case kinds.MemoryShort():
                seconds_left = event.steps_left * event.step_time_s
                self.full_at[event.worker_id, event.round] = record.at + seconds_left
                self._keep_newest(self.full_at, 1000, by_age=True)
            case kinds.SnapshotCompleted():
                self.snapshot_at = max(self.snapshot_at, record.at)
            case kinds.SnapshotFailed():
                self.snapshot_failure = max((record.at, record.text), self.snapshot_failure or (0.0, ""))
            case kinds.StreamOpened() | kinds.IterableOpened():
                self.streams.append(record)
            case kinds.RowsSkipped():
                self.skipped.append(record)
            case kinds.FitFinished():
                bisect.insort(self.fits_finished_at, record.at)
                self.streams.append(record)
                self._note_end("finished", record)
            case kinds.JobFailed():
                self.failure = record.text
                self._note_end("failed", record)

    def _note_end(self, what: Literal["round", "finished", "failed"], record: EventRecord) -> None:
        if what not in self._ending or self._ending[what].at <= record.at:
            self._ending[what] = record

    def ending(self) -> list[EventRecord]:
        """Return the events that decide how the job has ended, see `ended_how`."""
        return sorted(self._ending.values(), key=lambda each: each.at)

    @staticmethod
    def _keep_newest(found: dict[Any, Any], most: int, by_age: bool = False) -> None:
        while len(found) > most:
            del found[next(iter(found)) if by_age else min(found)]

    def windows_by_time(self) -> Sequence[Profile]:
        return self._windows

    def decision(self) -> Decision | None:
        """Return the newest decision; None if there is none, or it cannot be read."""
        at, made = self._decision
        if isinstance(made, Mapping):
            try:
                made = Decision.from_data(made)
                if not made.predicted_step_time_s > 0:
                    made = None
            except ValueError:
                made = None
            self._decision = at, made
        return made if isinstance(made, Decision) else None

    def shares(self, round_number: int) -> tuple[int, ...]:
        return self._shares.get(round_number, ())

    def shown_rounds(self) -> tuple[ShownRound, ...]:
        newest = sorted(self.rounds.values(), key=lambda each: each.number)
        return tuple(
            replace(each, stall_s=self.stalls[each.number][0]) if each.number in self.stalls else each for each in newest
        )


def shown_job(run_id: str, entries: Iterable[KeyValue], prefix: str, now: float) -> ShownJob:
    """Return the picture of a job from all its records, as one read of its keys gives them."""
    records = JobRecords(run_id)
    root = Keys(run_id, prefix).root
    for entry in entries:
        records.put(entry.key.removeprefix(root), entry.value)
    return records.shown(now)
