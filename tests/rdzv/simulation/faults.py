"""Faults of a run, drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from lightning_dlrover.rdzv.etcd.types import Delete, Put
from lightning_dlrover.rdzv.job.records import DrainRecord, PlanRecord, encode

from .job import Job
from .process import HANG_S, LEASE_S, Worker


def plague(job: Job) -> float:
    """Start the job's first nodes, draw its faults, and return the time at which the last one has begun."""
    rng = job.kernel.rng
    for _ in range(rng.randint(job.min_workers, job.max_workers)):
        job.start_node(rng.random() * rng.choice([0.2, 2.0]))
    if _plan_cuts(job):
        return 40.0
    if rng.random() < 0.4:
        job.etcd.loss = rng.choice([0.02, 0.1, 0.3])
    end_s = rng.uniform(4.0, 20.0)
    kinds = rng.sample(list(_KINDS), rng.randint(1, len(_KINDS)))  # a subset, so that some runs concentrate on one kind
    for _ in range(rng.randint(1, 8)):
        at = rng.uniform(0.5, end_s) if rng.random() < 0.7 else rng.uniform(0.5, 2.0)
        kind = rng.choice(kinds)
        job.kernel.after(at, lambda kind=kind: _happen(job, kind))  # type: ignore[misc]
    return end_s


def heal(job: Job) -> None:
    """Stop adding faults. The dead stay dead, and lasting faults, such as a partition, end in their time."""
    job.kernel.log("--", "from here on nothing goes wrong")
    job.etcd.loss = 0.0
    job.outgrown = set()
    job.etcd.set_up(True)
    for worker in job.workers.values():
        worker.client.before_write = worker.client.after_write = lambda: None
        worker.client.watch_delay_s = 0.02
        worker.client.set_cut(False)
        if worker.process.alive and worker.process.stopped:
            worker.process.go_on()


def _happen(job: Job, kind: str) -> None:
    job.kernel.log("--", kind)
    _KINDS[kind](job)


def _any(job: Job) -> Worker | None:
    """Pick mostly the coordinator or a member of the round: faults of other workers matter less."""
    rng, view = job.kernel.rng, job.etcd.views[-1]
    living = [w for w in job.workers.values() if w.process.alive]
    if not living:
        return None
    election = job.etcd.entries.get(job.keys.coordinator)
    coordinator = job.workers.get(election.value.decode()) if election else None
    if coordinator is not None and coordinator.process.alive and rng.random() < 0.3:
        return coordinator
    members = [w for w in living if view.round and w.id in view.round.members]
    return rng.choice(members if members and rng.random() < 0.6 else living)


def _kill(job: Job) -> None:
    if worker := _any(job):
        worker.kill()


def _kill_several(job: Job) -> None:
    for _ in range(job.kernel.rng.randint(2, 4)):
        _kill(job)


def _kill_in_a_write(job: Job) -> None:
    """Kill at its next write: before the request reaches etcd, or after it was executed without an answer."""
    if worker := _any(job):
        if job.kernel.rng.random() < 0.5:
            worker.client.before_write = worker.kill
        else:
            worker.client.after_write = worker.kill


def _lose_node(job: Job) -> None:
    if worker := _any(job):
        job.lose_node(job.nodes[worker.node])


def _stop(job: Job) -> None:
    """SIGSTOP, for less or more than a lease."""
    if worker := _any(job):
        worker.process.stop()
        worker.client.disturbed()
        job.kernel.log(worker.id, "stopped")

        def go_on() -> None:
            if worker.process.alive and worker.process.stopped:
                job.kernel.log(worker.id, "goes on")
                worker.client.disturbed()
                worker.process.go_on()

        job.kernel.after(LEASE_S * job.kernel.rng.choice([0.1, 0.5, 0.9, 1.1, 2.0, 3.0]), go_on)


def _stop_in_a_write(job: Job) -> None:
    """Stop it between deciding and writing, with the write still on its way."""
    if worker := _any(job):
        rng = job.kernel.rng

        def stop() -> None:
            worker.client.before_write = worker.client.after_write = lambda: None
            if worker.process.stopped:
                return
            worker.process.stop()
            worker.client.disturbed()
            job.kernel.log(worker.id, "stopped in a write")

            def go_on() -> None:
                worker.client.disturbed()
                if worker.process.alive and worker.process.stopped:
                    worker.process.go_on()

            job.kernel.after(LEASE_S * rng.choice([0.5, 1.1, 2.0]), go_on)

        if rng.random() < 0.5:
            worker.client.before_write = stop
        else:
            worker.client.after_write = stop


def _etcd_away(job: Job) -> None:
    job.etcd.set_up(False)
    job.kernel.after(job.kernel.rng.choice([0.5, 2.0, 6.0, 12.0]), lambda: job.etcd.set_up(True))


def _cut_from_etcd(job: Job) -> None:
    if worker := _any(job):
        worker.client.set_cut(True)
        job.kernel.log(worker.id, "cut from etcd")
        job.kernel.after(LEASE_S * job.kernel.rng.choice([0.3, 0.9, 1.5, 4.0]), lambda: worker.client.set_cut(False))


def _plan_cuts(job: Job) -> bool:
    """In some runs, cut several workers from etcd for less than two leases, mostly the coordinator, too.

    Drawn apart from all other faults. Return whether nothing else happens, so that no worker may lose its place.
    """
    own = random.Random(f"cuts {job.kernel.seed}")
    num_cuts = own.choice([0, 0, 0, 0, 0, 1, 1, 2])
    for number in range(num_cuts):
        at = own.uniform(2.0, 12.0) + number * (10.0 + 3 * LEASE_S)  # not before the one before is over
        if own.random() < 0.6:
            job.kernel.after(at - own.uniform(0.0, 4.0), lambda: job.start_node(0.0))
        share, seconds = own.choice([0.5, 1.0, 1.0]), LEASE_S * own.choice([0.4, 0.7, 1.0, 1.2, 1.5, 1.9])

        def cut(share: float = share, seconds: float = seconds) -> None:
            round_ = job.etcd.views[-1].round
            for worker in [w for w in job.workers.values() if w.process.alive and round_ and w.id in round_.members]:
                if own.random() < share:
                    worker.client.set_cut(True)
                    job.kernel.log(worker.id, "cut from etcd with others")
                    job.kernel.after(seconds * own.uniform(0.9, 1.0), lambda worker=worker: worker.client.set_cut(False))  # type: ignore[misc]

        job.kernel.after(at, cut)
    job.has_only_cuts = bool(num_cuts) and own.random() < 0.5
    if job.has_only_cuts:
        job.outgrown = set()
    return job.has_only_cuts


def _part_peers(job: Job) -> None:
    """Partition the network between nodes in two; all still reach etcd."""
    rng = job.kernel.rng
    for node in job.nodes:
        node.side = rng.randint(0, 1)
    job.network_changed_at = job.kernel.now

    def connections_end() -> None:
        for meeting in job.meetings:
            members = [w for w in meeting.round.members if w in job.workers]
            if any(not job.connected(v, w) for v in members for w in members):
                meeting.break_up()

    job.kernel.after(HANG_S, connections_end)

    def whole_again() -> None:
        for node in job.nodes:
            node.side = 0
        job.network_changed_at = job.kernel.now

    job.kernel.after(rng.choice([1.0, 3.0, 15.0, 80.0]), whole_again)


def _busy(job: Job) -> None:
    """Occupy a worker's main thread with the user's code, while its lease is kept alive."""
    if worker := _any(job):
        worker.busy_until = job.kernel.now + job.kernel.rng.choice([2.0, 8.0, 16.0, 60.0])
        job.kernel.log(worker.id, "is busy until", worker.busy_until)


def _slow_watch(job: Job) -> None:
    if worker := _any(job):
        client = worker.client
        client.watch_delay_s = job.kernel.rng.choice([0.5, 2.0, 4.0])

        def fast_again() -> None:
            client.watch_delay_s = 0.02
            client.disturbed()

        client.disturbed()
        job.kernel.after(job.kernel.rng.uniform(2.0, 10.0), fast_again)


def _evict_alive(job: Job) -> None:
    if (worker := _any(job)) and job.etcd.up:
        job.kernel.log(worker.id, "is evicted alive")
        job.evict(worker.id, 0.8)


def _unseat(job: Job) -> None:
    """Delete the election key, as a worker does that mistakes an evicted worker for the coordinator."""
    if job.keys.coordinator in job.etcd.entries and job.etcd.up:
        job.etcd.txn([], [Delete(job.keys.coordinator)])


def _plan(job: Job) -> None:
    rng = job.kernel.rng
    record = PlanRecord(rng.randint(1, job.max_workers + 1), "user", "because", binding=rng.random() < 0.8)
    job.etcd.txn([], [Put(job.keys.plan, encode(record))])


def _drain(job: Job) -> None:
    if worker := _any(job):
        request = DrainRecord(worker.id, "because", once_replaced=job.kernel.rng.random() < 0.3)
        job.kernel.log(worker.id, "is to be replaced" if request.once_replaced else "is asked to leave")
        job.etcd.txn([], [Put(job.keys.drains + worker.id, encode(request))])


def _join(job: Job) -> None:
    job.start_node(0.0)


_KINDS: dict[str, Callable[[Job], None]] = {
    "kill": _kill,
    "kill several": _kill_several,
    "kill in a write": _kill_in_a_write,
    "lose a node": _lose_node,
    "stop": _stop,
    "stop in a write": _stop_in_a_write,
    "etcd away": _etcd_away,
    "cut from etcd": _cut_from_etcd,
    "part peers": _part_peers,
    "slow watch": _slow_watch,
    "busy": _busy,
    "evict alive": _evict_alive,
    "unseat": _unseat,
    "plan": _plan,
    "drain": _drain,
    "join": _join,
}
