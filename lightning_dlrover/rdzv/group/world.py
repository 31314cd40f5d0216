"""The process group of a job's current round, formed and re-formed inside one worker process.

This is all that a training loop needs to be live-elastic. Most loops need `World.steps` alone (docs/plain_pytorch.md). What it
is made of serves loops that want to decide more themselves: `World.start` or `World.admit`, then `World.propose` and
`World.agreed` between steps, `World.switch` when a new round was agreed, `World.recover` when a collective failed,
`World.finish` and `World.leave` at the end. Every worker says a few bytes of `hello` when it enters a round, and receives those
of all others before the process group exists: enough to tell who is ahead.

The main thread forms and destroys groups. The membership thread only ever severs them (`RoundSockets`), which makes a
collective that the main thread is blocked in raise at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover._version import __version__
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.group import waits
from lightning_dlrover.rdzv.group.alone import LoneWorld
from lightning_dlrover.rdzv.group.any_world import AnyWorld
from lightning_dlrover.rdzv.group.config import WorldConfig
from lightning_dlrover.rdzv.group.failures import Failures
from lightning_dlrover.rdzv.group.forming import Forming
from lightning_dlrover.rdzv.group.gloo import (
    RoundSockets,
    StoreServer,
    own_address,
    protect_forks,
    use_interface_of,
    with_gloo,
)
from lightning_dlrover.rdzv.group.groups import RoundGroups
from lightning_dlrover.rdzv.group.hooks import compare_with
from lightning_dlrover.rdzv.group.leaving import drain_on_sigterm, end_with_agent
from lightning_dlrover.rdzv.group.left_state import LeftState
from lightning_dlrover.rdzv.group.loop import Stateful, Step, steps
from lightning_dlrover.rdzv.group.means import BlockingMeans
from lightning_dlrover.rdzv.group.meeting import Meeting
from lightning_dlrover.rdzv.group.purpose import Purpose
from lightning_dlrover.rdzv.group.reach import Neighbour, Reach
from lightning_dlrover.rdzv.group.reports import Reports
from lightning_dlrover.rdzv.group.standing import JobStanding
from lightning_dlrover.rdzv.group.transfer import Packed
from lightning_dlrover.rdzv.group.votes import Vote
from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.live.admission import JobClosedError
from lightning_dlrover.rdzv.live.member import Formation, LeftOutError, Member, MembershipError, WorldError, run_blocking
from lightning_dlrover.rdzv.live.membership import Membership
from lightning_dlrover.rdzv.live.rounds import View

__all__ = ["World"]

log = logging.getLogger(__name__)


class World:
    """This worker's process groups, one round after the other.

    Args:
        config: the job and this worker's place in it.
        backend: of the process groups, `gloo` or `cpu:gloo,cuda:nccl`; `nccl` stands for the latter.
        can_meet: whether workers with these hellos can go on together; must answer alike on all of them. If not, those who
            were to be admitted wait for another round.

    Raises:
        ValueError: the backend has no gloo for tensors on the CPU.
    """

    def __init__(
        self,
        config: WorldConfig,
        backend: str = "gloo",
        can_meet: Callable[[Mapping[str, bytes]], bool] = lambda hellos: True,
    ) -> None:
        self.config = config
        self.backend = backend = with_gloo(backend)
        self._has_nccl = "nccl" in backend
        if self._has_nccl:
            # NCCL's watchdog would end this process when a peer is lost; aborting the group is our watcher's business.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        protect_forks()
        self._client = EtcdClient(config.etcd)
        self._client.check()
        address = own_address(config.etcd.endpoints)
        use_interface_of(address)
        server = StoreServer(address, config.form_timeout_s)
        self.num_fits = 0  # of the script so far
        self.activity: Callable[[], str] = lambda: "between two collectives"  # of the training loop, for error messages
        self.is_in_step: Callable[[], bool] = lambda: False
        self.wishes: list[int] = []  # the smallest of what all members have wished in the newest vote of this round
        self._left_state = LeftState(Path(config.left_state_folder)) if config.left_state_folder else None
        self._vote: Vote | None = None
        self._meeting: Meeting | None = None  # of the round, unless this worker is alone in it
        self._watched: list[RoundSockets] = []  # none yet when the membership reads its first view
        self.membership = Membership(
            self._client, config.of_member(address, server.port), self._on_view, lambda: self._neighbour.probe()
        )
        self._groups = RoundGroups()
        reach = Reach(self.membership)
        self._reports = Reports(self.membership, config.run_id, lambda: self.formation)
        self._member = Member(
            BlockingMeans(config, self.membership, reach.silent, self._form, self._destroy, self._reports.wait)
        )
        self._sockets = RoundSockets(self._member, server, config.etcd.endpoints, self._has_nccl)
        self._neighbour = Neighbour(self.membership, self._member, reach, self._sockets.sever)
        self._forming = Forming(config, backend, can_meet, self.membership, self._member, self._sockets, self._groups, reach)
        self._watched.append(self._sockets)
        self._failures = Failures(lambda: self.broken, self._current_meeting)
        self._standing = JobStanding(self.membership, config.run_id, config.wait_timeout_s, lambda: self.formation)
        # NCCL's groups can be aborted; votes and the state travel through gloo in any case.
        waits.end_waits_with(weakref.WeakMethod(self._round_of_waits), all_waits=not self._has_nccl)
        compare_with(weakref.WeakMethod(self._current_meeting))

    @staticmethod
    def from_environment(backend: str = "gloo") -> AnyWorld:
        """The world of the job that started this process.

        Under `torchrun --rdzv-backend=etcd-v3`, or `dlrover run`, it is the job's; a script started as `python train.py` gets a
        world of its one worker, which nobody can join.

        Raises:
            WorldError: another launcher has started several workers.
            EtcdError: the job's etcd cannot be reached.
        """
        config = WorldConfig.from_environment(os.environ, __version__)
        if config is not None:
            end_with_agent()
            return World(config, backend)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise WorldError(
                f"this worker is one of {os.environ['WORLD_SIZE']} (WORLD_SIZE), started without the rendezvous backend "
                "etcd-v3, so they cannot find each other; start the script with torchrun --rdzv-backend=etcd-v3, or with python"
            )
        return LoneWorld()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.report_error(error)
        self.leave()

    def steps(self, num_steps: int, *, first_step: int = 0, check_interval_s: float = 0.1, **state: Stateful) -> Iterator[Step]:
        """Enter the job and make its steps, in whatever rounds they fall.

            for step in world.steps(1000, model=model, optimizer=optimizer):
                with step:
                    ...  # collectives first, then the update

        Between two steps workers join and leave; those who join get the state. When a collective fails because a worker was
        lost, the block is left and the step attempted again by the others. A worker that was asked to leave, or whose
        job is over already, ends here with SystemExit.

        Args:
            num_steps: of the whole job.
            first_step: steps made before, as a checkpoint that was loaded says. Of workers that start together the first in
                rank order is believed, and its state given to all.
            check_interval_s: about how often the workers agree on whether to change.
            state: whatever a step changes, as objects with `state_dict` and `load_state_dict`.

        Raises:
            WorldError: too few workers came, or no round could be formed in time.
            MembershipError: this worker cannot be part of the job: another model, another release, or taken for dead.
        """
        self.listen_for_sigterm()
        try:
            yield from steps(self, num_steps, first_step, state, check_interval_s)
        except LeftOutError as left_out:
            log.info("worker %s leaves: %s", self.worker_id, left_out)
            raise SystemExit(left_out.exit_code) from left_out
        except JobClosedError as error:
            # A worker that was started again, or late, for a job that has ended meanwhile: nothing is wrong with it.
            log.warning("%s", error)
            raise SystemExit(0) from error

    @property
    def worker_id(self) -> str:
        return self.membership.worker_id

    @property
    def formation(self) -> Formation | None:
        """The round that this worker has formed last."""
        return self._member.formation

    def start(self) -> Formation | None:
        """Enter the job: the first round, or None when others are already training and this worker joins them later.

        Raises:
            JobClosedError, MembershipError: the job cannot be joined.
            WorldError: too few workers came.
        """
        return run_blocking(self._member.start(self.membership.register()))

    def admit(self, hello: bytes, fingerprint: str) -> Formation:
        """Stand ready at the training loop's entrance until a round takes this worker in.

        Args:
            hello: said to the others; empty while this worker was not given the job's state.
            fingerprint: of this worker's model, see `model_fingerprint`.

        Raises:
            LeftOutError: the job ended, or this worker was asked to leave, before a round needed it.
            MembershipError: the job trains another model.
        """
        self._standing.check_joiner(fingerprint)
        return run_blocking(self._member.admit(hello, fingerprint))

    def close_to_joiners(self, reason: str) -> None:
        """Put on record why nobody can join; an empty reason opens the job again. Those who train go on in any case."""
        self._standing.close_to_joiners(reason)

    def switch(self, number: int, hello: bytes) -> Formation:
        """Leave the current group and form round `number` (or a newer one that replaced it).

        Raises:
            LeftOutError: the round goes on without this worker.
        """
        return run_blocking(self._member.switch(number, hello))

    def recover(self, hello: bytes) -> Formation:
        """Form the next round with those that are left after a collective of the current one failed.

        An empty `hello` says that this worker was not given the state yet; it may then have to wait to be admitted again.

        Raises:
            EvictedError: the others went on without this worker.
            WorldError: no round could be formed in time, or collectives fail again and again at the same place.
        """
        assert self.formation is not None
        if hello:
            self._failures.count_attempt(hello)
        formation = run_blocking(self._member.recover(hello))
        with contextlib.suppress(EtcdError, MembershipError):  # training matters more than what the job is taken for
            self._standing.announce_as_first()
        return formation

    def guard(self, replica: DistributedDataParallel) -> None:
        """Let the passes of a model that was wrapped for the current round end with the round in any case.

        By themselves they do but for one case: a worker is lost that has sent a part of a message. A model that has a hook for
        communication is left alone.
        """
        if self.formation is not None and self.formation.size > 1 and not self._has_nccl:
            waits.guard_replica(replica)

    def consequence_of_refusal(self) -> str:
        """What becomes of a job that refuses this worker, and the way out if nobody trains it any more."""
        return self._standing.consequence_of_refusal()

    def announce(self, fingerprint: str, global_batch_size: int = 0, data: str = "") -> None:
        """Declare that the job trains, and the model and the data that joiners must have.

        Called by all workers of the first round. Rank 0 writes it, or its successor if it dies first.
        """
        self._standing.announce(fingerprint, global_batch_size, data)

    @property
    def has_finished(self) -> bool:
        return self._standing.has_finished

    def ask_whether_finished(self) -> bool:
        """Whether nothing is left to train, in a later `fit` either, as of now: the view lags by the time that a watch takes.

        While etcd is away, the answer is the view's.
        """
        return self._standing.ask_whether_finished()

    def has_finished_fit(self, number: int) -> bool:
        """Whether a worker has reached the end of that `fit` of the script, from 1; others may have begun the next one."""
        return self._standing.has_finished_fit(number)

    def begin_fit(self, number: int) -> None:
        """The script trains once more: losses are survived again, though nobody joins any more.

        Args:
            number: of this `fit` in the script, from 2.
        """
        self._standing.begin_fit(number)

    def finish(self, num_steps: int, fit: int = 1) -> None:
        """All steps are made and nobody lacks the state of the last one: from here on the job does not change any more.

        Every worker says so before it goes on: the first one to exit must not be taken for lost.
        """
        self._standing.finish(num_steps, fit)

    @property
    def left_state(self) -> LeftState | None:
        """Where this worker's agent keeps the job's state while it replaces its workers; None: it has a single one."""
        return self._left_state

    def is_stop(self, number: int) -> bool:
        """Whether round `number`, which all members of the current one have agreed on, is the end of all of them."""
        newest = self.membership.view.round
        return newest is not None and (newest.number, newest.kind) == (number, "stop")

    def keep_for_successors(self, step: int, packed: Packed) -> None:
        """Keep the job's state for the next workers of this worker's agent. All members of a round call it before they leave.

        One worker of each agent writes; none of an agent that has a single worker.

        Raises:
            LeftStateError: there is no room.
        """
        if self._left_state is None or self.formation is None:
            return
        records = self.membership.view.workers
        members = [w for w in self.formation.round.members if w in records]
        first = next((w for w in members if records[w].agent_id == self.config.agent_id), self.worker_id)
        if first == self.worker_id:
            num_bytes = self._left_state.write(step, packed)
            text = f"kept the state of step {step} in this host's memory ({num_bytes / 2**20:.1f} MiB)"
            self.event("kept", text, {"global_step": step, "bytes": num_bytes})

    def leave(self) -> None:
        """End this worker's part: leave the group and the job's records."""
        meeting = self._meeting
        self._destroy(is_last=True)
        if meeting is not None:
            meeting.join(1.0)
        self._groups.join(0.5)
        self.membership.close()
        self._client.close()

    def resign(self) -> None:
        """Be no member any more, at once: this worker is about to end with an error."""
        with contextlib.suppress(EtcdError):
            self.membership.leave()
        self._sockets.sever(self._member.number, quietly=True)

    def listen_for_sigterm(self) -> None:
        """Let SIGTERM mean that this worker hands over and leaves; in any thread but the main one this does nothing."""
        drain_on_sigterm(self.membership, self.config.wait_timeout_s)

    def event(self, kind: str, text: str, data: dict[str, Any]) -> None:
        """Queue one line for the job's history; never blocks."""
        self.membership.event(kind, text, data)

    def report_error(self, error: BaseException) -> None:
        """Tell the job, and this worker's agent, why the worker is about to fail; and its user, who has failed before it."""
        self._reports.error(error)

    @property
    def broken(self) -> bool:
        """Whether the current group was cut off because its round has ended for good."""
        return self._sockets.are_severed

    def broken_error(self) -> WorldError:
        """To be raised, and recovered from, where `broken` is found instead of a collective that failed."""
        return WorldError("the round has ended")

    def is_failure(self, error: BaseException) -> bool:
        """Whether `error` says that this worker's round is broken: to `recover` from, not a mistake of the user's."""
        return self._failures.is_failure(error)

    def compared(self, purpose: Callable[[], Purpose]) -> contextlib.AbstractContextManager[None]:
        """Compare what this worker is about to do with what all others do; collectives within are taken to be part of it.

        Entering raises `MismatchError` if another worker does something else. A worker that is alone compares nothing.
        """
        meeting = self._meeting
        return meeting.compared(purpose()) if meeting is not None else contextlib.nullcontext()

    def all_reach(self, place: str) -> bool:
        """Wait until all workers have come to `place`; False once one of them has gone on without.

        Costs nothing to those who do not come. Each place needs a name of its own in a round.

        Raises:
            RoundEndedError: the round is over. Other workers may have had the answer True before: `recover`, and ask them.
        """
        if self._meeting is None:
            return True
        return self._meeting.all_reach(place, lambda: self.broken, self.config.collective_timeout_s)

    def _current_meeting(self) -> Meeting | None:
        return self._meeting

    def propose(self, check_every: int = 1, wishes: Sequence[int] = (), place: int = 0) -> None:
        """Begin to agree on a round to switch to; a collective of all members that overlaps with the next step.

        Args:
            check_every: steps until this worker would like to agree again; the largest of all members' wishes holds.
            wishes: further numbers, as many on all members, to learn the smallest of each; see `wishes`. At most 30, and 8
                more for each member.
            place: number of the next step; must be equal on all members.
        """
        assert self._vote is None
        assert self.formation is not None
        is_alone = self.formation.size == 1
        if self._meeting is None and not is_alone:
            raise self.broken_error()
        view = self.membership.view
        newest = view.round.number if view.round is not None else 0
        self._vote = Vote([newest, -check_every, *wishes], None if is_alone else self._meeting, place)

    @property
    def owned_sockets(self) -> list[tuple[int, int]]:
        """(fd, inode) of the sockets that forked children must not keep: copies would hide our death from the others."""
        return self._sockets.owned

    @property
    def is_voting(self) -> bool:
        return self._vote is not None

    def agreed(self) -> tuple[int | None, int]:
        """The round that all members have seen and shall switch to (None: stay), and the steps until the next vote."""
        assert self._vote is not None
        assert self.formation is not None
        vote, self._vote = self._vote, None
        newest, opposite, *self.wishes = vote.counted()
        return (newest if newest > self.formation.round.number else None), -opposite

    def connect(self, target: RoundRecord, name: str, workers: Sequence[str]) -> dist.ProcessGroupGloo:
        """A further group, beside that of a round, whose ranks are `workers`; to be called by all of them.

        They are the members of the round that this worker has formed last, some of them, or these and workers that the round
        goes on without. The group ends with the round: when that breaks, whatever waits in the group fails.

        Args:
            target: the round.
            name: of the group, another one each time.

        Raises:
            RoundEndedError: the round has broken, or one of `workers` has gone.
            UnreachableError: they could not connect in time.
        """
        return self._forming.connect(target, name, workers)

    def _form(self, target: RoundRecord, hello: bytes) -> Formation:
        formation, self._meeting = self._forming.form(target, hello, lambda: self.activity(), lambda: self.is_in_step())
        return formation

    def _destroy(self, is_last: bool = False) -> None:
        self._vote = None
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None
        self.wishes = []  # they were said in a round that is over
        self._groups.let_go(is_last)
        self._sockets.destroy_group()

    def _round_of_waits(self) -> tuple[int, bool]:
        self._failures.raise_mismatch()
        return self._member.number, self._sockets.are_severed_for_good

    def _on_view(self, view: View) -> None:
        """Membership thread: cut the group off when it will complete no more collectives."""
        for sockets in self._watched:
            sockets.follow(view, self.membership.evicted)
