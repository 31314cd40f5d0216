"""Messages that workers exchange on entering a round, and the transfer that makes their models equal."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover import DLRoverStrategy
from lightning_dlrover.live import training as module
from lightning_dlrover.live.loggers import _adopt_csv_log
from lightning_dlrover.live.training import (
    LiveTraining,
    Position,
    can_meet,
)
from lightning_dlrover.observe.pulse import Pulse
from lightning_dlrover.rdzv.group import transfer
from lightning_dlrover.rdzv.group.left_state import LeftState
from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.live.member import Formation, RoundEndedError
from lightning_dlrover.tables.snapshot import SnapshotError

BETWEEN = Position(updates=5, batch=5, in_step=False, collective=0, validation=0, at_boundary=True)
INSIDE = replace(BETWEEN, in_step=True, at_boundary=False)
JOINER = b""


def hellos(*said: Position | bytes) -> dict[str, bytes]:
    return {f"w{i}": each if isinstance(each, bytes) else each.encode() for i, each in enumerate(said)}


@pytest.mark.parametrize("position", [BETWEEN, INSIDE, replace(INSIDE, collective=7, validation=2)])
def test_a_position_is_understood_as_it_was_said(position: Position) -> None:
    assert Position.decode(position.encode()) == position


def test_a_joiner_has_no_position() -> None:
    assert Position.decode(JOINER) is None


@pytest.mark.parametrize("hello", [b"garbage", b"\xff", b"[]", b"null", b"{}", BETWEEN.encode().replace(b"5", b'"5"')])
def test_bytes_that_are_no_position_are_a_value_error(hello: bytes) -> None:
    with pytest.raises(ValueError, match=r"position|decode|Expecting"):
        Position.decode(hello)


@pytest.mark.parametrize(
    "said, expected",
    [
        ((BETWEEN, JOINER), True),
        ((BETWEEN, BETWEEN, JOINER, JOINER), True),
        ((INSIDE, JOINER), False),  # the state of an unfinished step cannot be handed over
        ((BETWEEN, INSIDE, JOINER), False),
        ((BETWEEN, replace(BETWEEN, batch=6), JOINER), False),  # conflicting positions
        ((replace(BETWEEN, at_boundary=False), JOINER), False),  # inside a validation or an accumulation window
        ((BETWEEN, INSIDE), True),  # survivors alone agree wherever they are
        ((JOINER, JOINER), True),  # no worker has a state: all begin
    ],
)
def test_joiners_are_let_in_only_where_all_others_stand_between_the_same_two_steps(
    said: tuple[Position | bytes, ...], expected: bool
) -> None:
    assert can_meet(hellos(*said)) is expected
    assert can_meet(hellos(*reversed(said))) is expected


class Own:
    """A value of the script's own, which must not be taken from other workers."""


@pytest.mark.parametrize("value, is_readable", [({"best": 1.5}, True), ({"best": Own()}, False)])
def test_a_state_that_could_not_be_gone_back_to_is_refused_when_it_is_packed(value: object, is_readable: bool) -> None:
    live = LiveTraining.__new__(LiveTraining)
    live._snapshots_are_readable = False
    live._names_in_state = frozenset()
    live._snapshot = lambda: {"callbacks": value}  # type: ignore[method-assign]
    if is_readable:
        assert transfer.loads(live._packed_snapshot()) == {"callbacks": value}
        return
    for _ in range(2):
        with pytest.raises(SnapshotError, match=r"add_safe_globals\(\[Own\]\)"):
            live._packed_snapshot()


def worker(**options: float) -> tuple[LiveTraining, torch.optim.Optimizer]:
    """A worker with manual optimization."""
    module: Any = torch.nn.Linear(2, 1)
    module.automatic_optimization = False
    optimizer = torch.optim.SGD([{"params": module.parameters(), **options}])
    progress = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    live = LiveTraining.__new__(LiveTraining)
    live._manual_window_is_open, live._gradients = False, None
    live._trainer = SimpleNamespace(  # type: ignore[assignment]
        lightning_module=module,
        optimizers=[optimizer],
        precision_plugin=SimpleNamespace(state_dict=dict),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(manual_optimization=SimpleNamespace(optim_step_progress=progress))),
    )
    return live, optimizer


@pytest.mark.parametrize("is_in_next_step", [False, True])
def test_missed_update_brings_an_open_manual_window(is_in_next_step: bool) -> None:
    (source, _), (target, _) = worker(lr=0.1), worker(lr=0.1)
    module = source._trainer.lightning_module
    module.weight.grad = torch.tensor([[1.0, 2.0]])
    source._manual_window_is_open = True
    if is_in_next_step:
        source._gradients = source._copy_of_gradients()
        module.weight.grad += 5.0  # gradient of the next batch, which will be computed again
    target._apply(source._last_update())
    assert target._manual_window_is_open
    assert torch.equal(target._trainer.lightning_module.weight.grad, torch.tensor([[1.0, 2.0]]))  # type: ignore[arg-type]
    assert target._trainer.lightning_module.bias.grad is None


def test_missed_update_brings_counters_of_parameter_groups() -> None:
    source, _ = worker(lr=0.1, k=7, weight_sum=0.5)  # counters as of schedule-free optimizers
    target, optimizer = worker(lr=0.2, k=6, weight_sum=0.4)
    target._apply(source._capture())
    (group,) = optimizer.param_groups
    assert (group["k"], group["weight_sum"]) == (7, 0.5)
    assert group["lr"] == 0.2  # set by its own scheduler
    weights = [live._trainer.lightning_module.weight for live in (source, target)]
    assert torch.equal(*weights)  # type: ignore[arg-type]


# --- rounds -------------------------------------------------------------------------------------------------------------------


class Wrapping(DLRoverStrategy):
    """Strategy of one of two workers that forms no group."""

    world_size = 2
    elastic_tables = lightning_module = model = None
    _tables = None

    def __init__(self, lightning_module: Any) -> None:
        self.lightning_module = lightning_module
        self.unused = SimpleNamespace(agree=lambda found, is_first: None)  # type: ignore[assignment]
        self._ddp_kwargs: dict[str, Any] = {}

    def enter_round(self, rank: int, size: int) -> None:
        pass

    def configure_ddp(self) -> None:
        replica: Any = DistributedDataParallel.__new__(DistributedDataParallel)
        torch.nn.Module.__init__(replica)
        replica.require_forward_param_sync = True
        self.model = replica


def formation_of(said: dict[str, bytes], worker: str) -> Any:
    members = list(said)
    round_ = SimpleNamespace(members=members, number=2)
    return SimpleNamespace(
        hellos=said, round=round_, rank=members.index(worker), size=len(members), rank_of=lambda w: members.index(w)
    )


def member(name: str, training: bool = True) -> LiveTraining:
    """A worker of several that can only enter a round."""
    live, _ = worker(lr=0.1)
    trainer: Any = live._trainer
    trainer.training = training
    trainer.fit_loop._combined_loader = SimpleNamespace(flattened=[])
    trainer.lightning_module.trainer = trainer
    live._strategy = Wrapping(trainer.lightning_module)
    live.world = SimpleNamespace(worker_id=name, is_failure=lambda error: isinstance(error, RoundEndedError))  # type: ignore[assignment]
    live._pace = SimpleNamespace(went_on=lambda batch: None)  # type: ignore[assignment]
    live._results, live._missed, live._outgoing, live._fit = {}, {}, None, 1
    live._is_between_fits = live._is_redoing = live._in_step = False
    live._entered = True
    live._batch, live._collective = 5, 0
    live._take_over_rank_zero = live._settle_validation = lambda *args: None  # type: ignore[assignment, method-assign]
    return live


@pytest.mark.parametrize("is_in_validation", [False, True])
def test_all_workers_of_a_round_agree_whether_the_next_forward_pass_sends_buffers(
    is_in_validation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first one has ended a validation and is in the step after it. The second one may still be in its last collective.
    second = replace(BETWEEN, at_boundary=False, collective=3, validation=1) if is_in_validation else INSIDE
    said = hellos(replace(INSIDE, batch=6), second)
    monkeypatch.setattr(transfer, "send", lambda results, rank: None)
    monkeypatch.setattr(transfer, "receive", lambda rank: {})
    found = []
    for name, training in (("w0", True), ("w1", not is_in_validation)):
        live = member(name, training)
        live._settle(formation_of(said, name), Position.decode(said[name]))
        replica: Any = live._strategy.model
        found.append(replica.require_forward_param_sync)
    assert found == [not is_in_validation] * 2


def test_buffers_sent_before_a_validation_reach_a_worker_that_a_loss_kept_from_receiving_them() -> None:
    live = member("w1")
    live.formation = formation_of(hellos(BETWEEN, BETWEEN), "w1")
    live._trainer.lightning_module.register_buffer("mean", torch.zeros(3))
    live._missed = {(5, 1): {"mean": torch.arange(3.0)}}
    live.send_buffers()
    assert torch.equal(live._trainer.lightning_module.mean, torch.arange(3.0))  # type: ignore[arg-type]


def test_results_of_earlier_collectives_are_dropped_when_all_have_them() -> None:
    live = member("w0")
    live._checked = lambda run: run()  # type: ignore[method-assign]
    for _ in range(100):
        live.collective(lambda: torch.ones(1000))
    assert list(live._results) == [(5, 100)]


@pytest.mark.parametrize("decision", [True, False])
def test_decision_that_a_survivor_took_with_the_lost_worker_holds_for_all(decision: bool) -> None:
    live = member("w1")
    live._missed = {(5, 1): decision}
    live._strategy._live, live._strategy._is_alone = live, False
    assert live._strategy.reduce_boolean_decision(not decision) is decision


def test_what_was_sent_before_a_validation_stays_as_it_was_sent() -> None:
    strategy = member("w0")._strategy
    strategy.configure_ddp()
    replica: Any = strategy.model
    mean = torch.arange(3.0)
    replica.module = torch.nn.Module()
    replica.module.register_buffer("mean", mean)
    replica.broadcast_buffers, replica.named_module_buffers = True, {"mean": mean}
    replica._sync_buffers = lambda: None
    sent = strategy.send_buffers()
    mean += 1.0  # the next training step
    assert torch.equal(sent["mean"], torch.arange(3.0))
    assert not replica.require_forward_param_sync


def test_batches_that_a_loss_has_computed_again_are_not_counted_for_the_step_that_closes_their_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = member("w0")
    trainer: Any = live._trainer
    progress = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.automatic_optimization = SimpleNamespace(optim_progress=SimpleNamespace(optimizer=progress))
    epoch_loop.batch_progress = SimpleNamespace(current=SimpleNamespace(ready=2))
    trainer.accumulate_grad_batches, trainer.fit_loop._should_accumulate = 2, lambda: False
    live.metrics = SimpleNamespace(agree_on_step=lambda: None)  # type: ignore[assignment]
    live._is_failure = lambda error: True  # type: ignore[method-assign]
    live._recover = lambda: False  # type: ignore[method-assign]
    live._copy_if_weights_move_inside = lambda optimizer: None  # type: ignore[method-assign]
    live._redo_window = lambda inside: live.backward_begins()  # type: ignore[assignment, method-assign, misc]
    live._updates = live._max_backwards = live._num_backwards = 0
    monkeypatch.setattr(module, "call_restart_hooks", lambda trainer, batch_idx: None)
    failures = [RoundEndedError("a worker was lost")]

    def run(*args: Any) -> dict[str, Any]:
        live.backward_begins()
        if failures:
            raise failures.pop()
        return {}

    live.run_automatic(run, None, 1, {})
    assert live._max_backwards == 1


@pytest.mark.parametrize("has_left_state", [False, True])
def test_new_workers_that_all_have_a_left_state_are_not_given_one_again(has_left_state: bool) -> None:
    said = hellos(JOINER, JOINER)
    live = member("w1")
    given: list[Any] = []
    live._resume_left_state = lambda: has_left_state  # type: ignore[method-assign]
    live._give_state = lambda formation, joining: given.append(joining)  # type: ignore[method-assign]
    live._settle(formation_of(said, "w1"), None)
    assert given == ([] if has_left_state else [[("w0", "w1")]])


@pytest.mark.parametrize("name, is_closed", [("w0", True), ("w1", False)])
def test_only_the_source_of_a_state_that_cannot_be_sent_closes_the_job_to_joiners(
    name: str, is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_save_checkpoint() -> dict[str, Any]:
        raise AttributeError("what on_load_checkpoint brings")

    live = member(name)
    reasons: list[str] = []
    live.world.config = SimpleNamespace(run_id="job")  # type: ignore[assignment]
    live.world.close_to_joiners = reasons.append  # type: ignore[assignment, method-assign]
    live._message = on_save_checkpoint  # type: ignore[method-assign]
    live._received = live._restore = lambda *args, **options: None  # type: ignore[assignment, method-assign]
    monkeypatch.setattr(transfer, "send", lambda state, rank: None)
    live._give_state(formation_of(hellos(JOINER, JOINER), name), [("w0", "w1")])
    assert len(reasons) == is_closed


@pytest.mark.parametrize("error, is_kept", [(KeyError("best"), False), (RoundEndedError("a worker was lost"), True)])
def test_a_left_state_that_cannot_be_restored_is_not_met_again(
    error: Exception, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restore(*args: Any, **options: Any) -> None:
        raise error

    live = member("w0")
    live.formation = None  # this worker is alone
    left = LeftState(tmp_path)
    left.write(7, transfer.pack({"state": {}, "values": {}}))
    live.world.left_state, live.world.has_finished = left, False  # type: ignore[misc]
    live._trainer.global_step = 0  # type: ignore[misc]
    live._unread_checkpoint = lambda: None  # type: ignore[method-assign]
    live._names_in_state = frozenset()
    live._restore = restore  # type: ignore[method-assign]
    monkeypatch.setattr(module, "TrainerState", dict)
    with pytest.raises(type(error)):
        live._resume_left_state()
    assert left.step() == (7 if is_kept else None)


# --- switching ----------------------------------------------------------------------------------------------------------------


def test_loss_while_the_state_is_packed_ends_the_switch() -> None:
    live = LiveTraining.__new__(LiveTraining)
    switched_to: list[int] = []

    def formed(number: int, *members: str) -> Formation:
        return Formation(RoundRecord(number, [*members], "", "grow", planned=True), {}, 0)

    def pack() -> transfer.Packed:  # contains a user's collective, during which the others recover from a loss
        live.formation = formed(3, "w0", "w1")
        return transfer.pack({})

    planned = formed(2, "w0", "w1", "w2", "w3").round
    live.formation = formed(1, "w0", "w1", "w2")
    live.world = SimpleNamespace(  # type: ignore[assignment]
        worker_id="w0",
        membership=SimpleNamespace(view=SimpleNamespace(round=planned)),
        switch=lambda number, hello: switched_to.append(number),
    )
    live._strategy = SimpleNamespace(elastic_tables=None)  # type: ignore[assignment]
    live._pace = SimpleNamespace(held_up=lambda: None)  # type: ignore[assignment]
    live._partial_values = lambda with_large=True: {}  # type: ignore[method-assign]
    live._gathered = lambda mine: [mine] * 3  # type: ignore[method-assign]
    live._packed_message = pack  # type: ignore[assignment, method-assign]
    live._switch(2)
    assert switched_to == []
    assert live._outgoing is None


# --- several fits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fit_of_vote, stops", [(1, False), (2, True)])
def test_wish_to_stop_ends_no_later_fit(fit_of_vote: int, stops: bool) -> None:
    live, _ = worker(lr=0.1)
    world: Any = SimpleNamespace(num_fits=0, broken=False, membership=SimpleNamespace(checkpoint_request=lambda: 0))
    trainer: Any = live._trainer
    trainer.should_stop = False
    trainer.fit_loop.epoch_loop.batch_progress = SimpleNamespace(total=SimpleNamespace(ready=0))
    round_ = RoundRecord(1, ["w0"], "start with 1 worker", "start", planned=True)
    live.world, live.formation, live.pulse = world, Formation(round_, {}, 0), Pulse()
    live._strategy = SimpleNamespace(elastic_tables=None)  # type: ignore[assignment]
    live._pace = SimpleNamespace(round_to_switch_to=lambda place: None, step_time_s=0.0)  # type: ignore[assignment]
    live._saved_request = live._vote_fit = 0
    for fit in (1, 2):
        live.fit_begins()
        if fit == fit_of_vote:
            live._wants_stop = True
            world.wishes = live._wishes()
    live._maybe_switch()
    assert trainer.should_stop is stops


@pytest.mark.parametrize("has_finished", [[True, False], [False, True]])
def test_left_state_is_refused_by_all_or_by_none(has_finished: list[bool]) -> None:
    live = LiveTraining.__new__(LiveTraining)
    gathered = []

    def gather(mine: Any) -> list[Any]:
        gathered.append(mine)
        return [mine, (mine[0], has_finished[1])]

    live._gathered = gather  # type: ignore[method-assign]
    live._unread_checkpoint = lambda: None  # type: ignore[method-assign]
    live._strategy = SimpleNamespace(elastic_tables=None)  # type: ignore[assignment]
    left = SimpleNamespace(step=lambda: 10)
    live.world = SimpleNamespace(has_finished=has_finished[0], left_state=left)  # type: ignore[assignment]
    assert not live._resume_left_state()
    assert len(gathered) == 1


# --- logs ---------------------------------------------------------------------------------------------------------------------


def test_a_csv_log_taken_over_from_another_worker_keeps_its_rows(tmp_path: Path) -> None:
    former = CSVLogger(tmp_path, name="log", version=0)
    for step in range(3):
        former.log_metrics({"loss": float(step)}, step)
    former.save()
    successor = CSVLogger(tmp_path, name="log", version=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # must not warn, for example that earlier rows will be deleted
        _adopt_csv_log(successor)
    successor.log_metrics({"loss": 3.0}, 3)
    successor.save()
    rows = (Path(successor.log_dir) / "metrics.csv").read_text().splitlines()
    assert rows[0].split(",") == ["loss", "step"]
    assert len(rows) == 5


def test_a_new_column_after_taking_over_a_csv_log_costs_no_rows(tmp_path: Path) -> None:
    former = CSVLogger(tmp_path, name="log", version=0)
    former.log_metrics({"loss": 1.0}, 0)
    former.save()
    successor = CSVLogger(tmp_path, name="log", version=0)
    _adopt_csv_log(successor)
    successor.log_metrics({"loss": 2.0, "val": 0.5}, 1)
    successor.save()
    rows = (Path(successor.log_dir) / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3
    assert "val" in rows[0]


def test_there_is_nothing_to_take_over_where_no_log_was_written(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="log", version=0)
    _adopt_csv_log(logger)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    assert len((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()) == 2
