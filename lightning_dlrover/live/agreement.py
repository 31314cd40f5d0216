"""Agreement of all workers after a step: votes, and a check for weights that have drifted apart."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dlrover.checks import UnsupportedScriptError, different_rates, rates, rates_digest
from lightning_dlrover.data.lane_plan import share
from lightning_dlrover.live.data_agreement import digest, refuse_different_rows
from lightning_dlrover.live.metrics import KeptValues
from lightning_dlrover.live.order import FitPosition, Position
from lightning_dlrover.live.recovery import ResilientCollectives
from lightning_dlrover.live.replica import TrainerOfFit
from lightning_dlrover.live.train_loaders import TrainLoaders
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.job.events import ReplicaDrifted, SharesChanged
from lightning_dlrover.rdzv.membership.member import Formation
from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.rdzv.transport.transfer import is_expanded
from lightning_dlrover.tuning.health import NUM_PER_WORKER, Pulse
from lightning_dlrover.tuning.profiler import GpuPeak
from lightning_dlrover.tuning.resources import available_bytes, status_bytes
from lightning_dlrover.tuning.stragglers import SPEED_UNIT, ShareBalancer

log = logging.getLogger(__name__)

# Detect replicas that drift apart: weights, buffers and optimizer states that should be equal on all workers and are not.
#
# DDP keeps replicas equal as long as each of them changes by the same updates only. Whatever else changes one of them, such
# as `max_norm` of an embedding or noise that each worker draws, goes unnoticed. So each vote includes a checksum of a slice
# of all values. The slices of `PERIOD_STEPS` steps cover everything. Which slice is next follows from the number of the
# step alone.
#
# Only a checksum that differs costs more: the workers compare each tensor of the slice. Three differences are no drift:
#   - rounding, as between two kinds of processors;
#   - a buffer that all workers have changed: each writes its own, as in BatchNorm, and DDP sends rank 0's before a forward
#     pass;
#   - a buffer that has differed since a worker joined, because no checkpoint holds it. It is set to rank 0's.
# Tensors that DDP ignores, or that are sharded, are never compared.
#
# A checksum is computed where the tensors are. From a GPU it is read with the next vote, when the host has waited for the
# device.

PERIOD_STEPS = 64
"""Steps in which each byte is part of one checksum."""

MAX_DOUBLINGS = 6
"""Doublings of `PERIOD_STEPS` in the longest pause after a difference by rounding."""

TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""Maximum difference by rounding, in parts of a tensor's largest value. Values of all other types must be equal."""

MASK = (1 << 56) - 1
"""Bits of a number in a vote."""

Slice = tuple[int, int]
"""First byte and the byte after the last, of all items one after the other. A slice may wrap around to the beginning."""


@dataclass(frozen=True)
class Item:
    """A tensor that is to be equal on all workers."""

    name: str
    tensor: Tensor
    start: int  # its first byte among all items

    @property
    def is_buffer(self) -> bool:
        return self.name.startswith("buffer ")


def num_bytes_of(items: Sequence[Item]) -> int:
    return items[-1].start + items[-1].tensor.nbytes if items else 0


def slice_between(former: int, place: int, num_bytes: int) -> Slice:
    """Return the slice of the steps from `former` to `place`. It begins and ends between two numbers of 8 bytes."""
    if place - former >= PERIOD_STEPS:
        return 0, num_bytes
    first, last = (num_bytes * (step % PERIOD_STEPS) // PERIOD_STEPS // 8 * 8 for step in (former, place))
    return first, last if last > first or former == place else last + num_bytes


def checksum(tensor: Tensor, first: int = 0, last: int | None = None) -> Tensor:
    """Return the sum of a tensor's bytes from `first` up to `last`, taken as integers, on its device.

    Sums of integers depend neither on their order nor on the number of threads.
    """
    flat = tensor.detach().reshape(-1).view(torch.uint8)[first:last]
    whole = flat.numel() // 8 * 8
    if flat.storage_offset() % 8:
        return flat.sum(dtype=torch.int64)
    total = flat[:whole].view(torch.int64).sum()
    return total if whole == flat.numel() else total + flat[whole:].sum(dtype=torch.int64)


def checksum_of_slice(items: Sequence[Item], slice_: Slice) -> Tensor | None:
    """Return a checksum of all bytes of a slice, on the items' device; None if there are none."""
    sums = []
    num_bytes = num_bytes_of(items)
    for first, last in ((slice_[0], min(slice_[1], num_bytes)), (0, slice_[1] - num_bytes)):
        index = max(0, bisect_right(items, first, key=lambda item: item.start) - 1)
        while index < len(items) and items[index].start < last:
            item = items[index]
            index += 1
            begin, end = max(first - item.start, 0), min(last - item.start, item.tensor.nbytes)
            if begin < end:
                sums.append(checksum(item.tensor, begin, end))
    if not sums:
        return None
    together = torch.stack(sums)
    return (together * (2 * torch.arange(len(sums), device=together.device) + 1)).sum()  # two changes must not cancel out


def explain_drift(name: str, difference: float, rank: int) -> str:
    """Return the error for a tensor that differs between workers.

    Args:
        difference: largest one, in parts of the tensor's largest value.
        rank: worker with that difference to rank 0.
    """
    by = f"by {100 * difference:.3g} % of its largest value" if math.isfinite(difference) else "by values that are not finite"
    return (
        f"the workers' models drift apart: {name} on rank {rank} differs from rank 0's {by}. All workers make the same "
        "updates, so something else changes it on single workers: max_norm of nn.Embedding, a value that forward or a "
        "hook writes, noise that each worker draws. Change it equally on all workers, let DLRoverStrategy(on_drift='repair') "
        "copy rank 0's values, or name tensors that are to differ in _ddp_params_and_buffers_to_ignore of the module"
    )


class DriftCheck:
    """One worker's checksums in the votes, and what follows from them."""

    def __init__(self, world: World, batches: TrainLoaders, trainer: TrainerOfFit, position: FitPosition) -> None:
        self._world = world
        self._batches = batches
        self._trainer = trainer
        self._position = position
        self.begin_fit()

    def begin_fit(self) -> None:
        """Compare from the beginning, with the tensors of another `fit` or round."""
        self._round_number = 0  # everything below is equal on all workers of the round, except for values
        self._items: list[Item] = []
        self._period: int | None = None  # period in which the items were found
        self._former = 0  # step of the vote before
        self._late: tuple[Slice, Tensor] | None = None  # slice and checksum that the device may still compute
        self._slice: Slice = (0, 0)  # of the checksum in the newest vote
        self._first: dict[str, Tensor] = {}  # checksum of each buffer when the round began
        self._own: set[str] = set()  # buffers that each worker writes for itself
        self._rests: dict[str, tuple[int, int]] = {}  # pauses so far, and step before which a tensor is not compared; "": all

    def ballot(self) -> int:
        """Return the number for a vote that begins. It is equal on workers with equal values."""
        position, place = self._position, self._batches.batch_number
        if position.size == 1 or position.formation is None or self._trainer.strategy.on_drift == "ignore":
            return 0
        if self._round_number != position.formation.round.number:
            self.begin_fit()
            self._round_number, self._former = position.formation.round.number, place - 1
        former, self._former, self._slice = self._former, place, (0, 0)
        if self._is_resting(""):
            self._late = None
            return 0
        if self._period != place // PERIOD_STEPS:
            self._period = place // PERIOD_STEPS
            self._find_items()
        now = slice_between(former, place, num_bytes_of(self._items))
        found = checksum_of_slice(self._items, now)
        if found is None:
            return 0
        if found.device.type == "cpu":
            self._slice = now
            return int(found) & MASK
        late, self._late = self._late, (now, _on_host(found))
        if late is None:
            return 0
        self._slice = late[0]
        return int(late[1]) & MASK

    def examine(self) -> None:
        """Find what differs in the slice of a vote that was not unanimous. All workers call this together.

        Raises:
            UnsupportedScriptError: a tensor differs by more than rounding, and is not to be repaired.
        """
        if self._slice == (0, 0):
            return
        self._find_items()
        there = self._items_in(self._slice)
        layout = hashlib.sha256(repr([(item.name, item.tensor.shape, item.tensor.dtype) for item in there]).encode()).digest()
        sums = [int(checksum(item.tensor)) for item in there]
        changed = [item.is_buffer and int(self._first[item.name]) != found for item, found in zip(there, sums, strict=True)]
        said = transfer.all_gather((layout, sums, changed))
        self._period = None  # the items are found again, as those in use may be former ones
        if len({each for each, _, _ in said}) > 1:
            self._rest("")  # the workers have different tensors
            return
        differing = [i for i in range(len(there)) if len({of_rank[i] for _, of_rank, _ in said}) > 1]
        num_changed = {i: sum(of_rank[i] for _, _, of_rank in said) for i in differing}
        own = {i for i in differing if num_changed[i] == len(said)}
        self._own |= {there[i].name for i in own}
        suspects = [i for i in differing if i not in own]
        if suspects:
            as_before = {there[i].name for i in suspects if there[i].is_buffer and not num_changed[i]}
            self._judge([there[i] for i in suspects], as_before)

    def _judge(self, suspects: Sequence[Item], as_before: Collection[str]) -> None:
        """Act on tensors that differ.

        Args:
            as_before: names of buffers that have differed since the round began.
        """
        theirs = [_of_rank_0(item.tensor) for item in suspects]
        mine = [_relative_difference(item.tensor, first) for item, first in zip(suspects, theirs, strict=True)]
        by_rank: list[list[float]] = transfer.all_gather(mine)
        for i, item in enumerate(suspects):
            rank = max(range(len(by_rank)), key=lambda r: by_rank[r][i])
            difference = by_rank[rank][i]
            if difference <= TOLERANCES.get(item.tensor.dtype, 0.0):
                self._rest(item.name)
                continue
            is_repaired = self._trainer.strategy.on_drift == "repair" or item.name in as_before
            text = explain_drift(item.name, difference, rank)
            if self._position.rank == 0:
                place = self._batches.batch_number
                shown = f"{item.name} of rank {rank} had drifted, and was set to rank 0's" if is_repaired else text
                log.warning("%s", shown)
                self._world.event(ReplicaDrifted(place, item.name, rank, is_repaired), shown)
            if not is_repaired:
                raise UnsupportedScriptError(text)
            with torch.no_grad():
                item.tensor.copy_(theirs[i])

    def _rest(self, name: str) -> None:
        """Leave a tensor out of the comparisons, for longer each time: rounding does not go away."""
        number = self._rests.get(name, (0, 0))[0] + 1
        self._rests[name] = number, self._batches.batch_number + PERIOD_STEPS * 2 ** min(number, MAX_DOUBLINGS)

    def _is_resting(self, name: str) -> bool:
        return self._batches.batch_number < self._rests.get(name, (0, 0))[1]

    # --- what is compared ----------------------------------------------------------------------------------------------------

    def _find_items(self) -> None:
        strategy, trainer = self._trainer.strategy, self._trainer.lightning
        module, device = trainer.lightning_module, strategy.root_device
        left_out = {*getattr(module, "_ddp_params_and_buffers_to_ignore", ()), *strategy.sharded_names}
        parameters = {name: each for name, each in module.named_parameters() if name not in left_out}
        buffers = {f"buffer {name}": each for name, each in module.named_buffers() if name not in left_out}
        found = {f"parameter {name}": each.data for name, each in parameters.items() if _is_plain(each)}
        found |= {name: each for name, each in buffers.items() if name not in self._own and _is_plain(each)}
        if strategy.tables is None:
            names = {id(each): name for name, each in parameters.items()}
            for number, optimizer in enumerate(trainer.optimizers):
                for parameter in (each for group in optimizer.param_groups for each in group["params"] if id(each) in names):
                    for key, value in optimizer.state.get(parameter, {}).items():
                        # Counts of steps are tensors of one number, which are often on another device.
                        if isinstance(value, Tensor) and value.numel() > 1 and _is_plain(value):
                            found[f"{key} of optimizer {number} for parameter {names[id(parameter)]}"] = value
        self._items, start = [], 0
        for name, tensor in found.items():
            if tensor.device != device or not tensor.numel() or self._is_resting(name):
                continue
            tensor = _in_order_of_memory(tensor)
            self._items.append(Item(name, tensor, start))
            start += -(-tensor.nbytes // 8) * 8
            if self._items[-1].is_buffer and name not in self._first:
                self._first[name] = checksum(tensor)

    def _items_in(self, slice_: Slice) -> list[Item]:
        """Return all items with a byte in a slice."""
        parts = (slice_, (0, slice_[1] - num_bytes_of(self._items)))
        return [
            item
            for item in self._items
            if any(item.start < last and first < item.start + item.tensor.nbytes for first, last in parts)
        ]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has values of its own in memory: it is not sharded, quantized, sparse or without a shape."""
    is_dense = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized
    return is_dense and not tensor.is_meta and not is_expanded(tensor) and _in_order_of_memory(tensor).is_contiguous()


def _in_order_of_memory(tensor: Tensor) -> Tensor:
    """Return a view whose last dimension is that of neighbours in memory, as for `channels_last`."""
    if tensor.is_contiguous():
        return tensor
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def _on_host(number: Tensor) -> Tensor:
    """Begin to copy a number from a device, without waiting for it."""
    host = torch.empty((), dtype=number.dtype, pin_memory=True)
    host.copy_(number, non_blocking=True)
    return host


def _of_rank_0(tensor: Tensor) -> Tensor:
    values = tensor.detach().cpu().reshape(-1).view(torch.uint8).clone()
    transfer.broadcast(values)
    return values.view(tensor.dtype).reshape(tensor.shape)


def _relative_difference(tensor: Tensor, first: Tensor) -> float:
    """Return the largest difference in parts of rank 0's largest value; infinite if a value is not finite."""
    mine, theirs = (each.detach().cpu().reshape(-1) for each in (tensor, first))
    if torch.equal(mine, theirs):
        return 0.0
    if mine.is_complex():
        mine, theirs = torch.view_as_real(mine), torch.view_as_real(theirs)
    mine, theirs = mine.double(), theirs.double()
    largest = float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
    return largest if math.isfinite(largest) else math.inf


# Give a slow worker fewer samples of the same global batch, so that the others need not wait for it.
#
# Rank 0 decides by the times that all workers have put into the votes, and puts the speeds into the next vote. All workers
# receive them with the vote's result, between the same two batches, and split the next batch by them. A new round begins with
# equal shares.

LOOK_EVERY = 4
"""Votes between two of rank 0's decisions, each of which takes a fraction of a millisecond."""

MAX_NAMED = 4
"""Workers with a smaller share that an event names."""

MEMORY_LOOK_S = 5.0
"""Seconds between two looks of a worker for the memory that a larger share could take."""

MEMORY_SHARE = 0.5
"""Fraction of the free memory that larger shares may take."""

NO_SPEED = 1 << 62
"""Number in a vote of the workers that do not decide: it is above all speeds."""


class SpeedShares:
    """One worker's part in the shares of the workers."""

    def __init__(self, world: World, batches: TrainLoaders, trainer: TrainerOfFit, position: FitPosition, pulse: Pulse) -> None:
        self._world = world
        self._batches = batches
        self._trainer = trainer
        self._position = position
        self._pulse = pulse
        self._balancer = ShareBalancer()
        self._looked_at = 0  # votes counted at rank 0's newest decision
        self._largest = 1.0
        self._next_memory_look = 0.0
        self._gpu_peak = GpuPeak(trainer.device)  # its own: each reading of torch's peak begins another one
        self._gpu_taken = 0  # largest peak so far

    def largest_share(self) -> float:
        """Return the largest share that this worker may take, in equal shares; 0 if all shares must be equal.

        They must be with several loaders, as one weight of the loss would not fit each loader's rounded shares.
        """
        if self._trainer.strategy.shares == "equal" or self._position.needs_equal_shares or len(self._batches.all) > 1:
            return 0.0
        if (now := time.monotonic()) >= self._next_memory_look:
            self._next_memory_look = now + MEMORY_LOOK_S
            self._largest = 1 + MEMORY_SHARE * self._free_memory()
        return self._largest

    def _free_memory(self) -> float:
        """Return the memory that this worker may still take, as a fraction of that which it takes."""
        device, formation = self._trainer.device, self._position.formation
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            self._gpu_taken = taken = max(self._gpu_taken, self._gpu_peak.take())
            free += max(0, torch.cuda.memory_reserved(device) - taken)
        else:
            free, taken = available_bytes(), status_bytes("VmHWM")["VmHWM"]
            free //= formation.num_workers_here if formation is not None else 1
        return max(0.0, free / max(1, taken))

    def ballot(self) -> list[int]:
        """Return the numbers for a vote that begins: rank 0's are the speeds from the vote's end on."""
        position = self._position
        if position.rank != 0:
            return [NO_SPEED] * position.size
        return list(self._decided() or (SPEED_UNIT,) * position.size)

    def _decided(self) -> tuple[int, ...]:
        position, pulse = self._position, self._pulse
        if position.formation is None or position.size < 2 or pulse.num_observations < self._looked_at + LOOK_EVERY:
            return position.speeds
        self._looked_at = pulse.num_observations
        round_ = position.formation.round
        seen, batch_size = pulse.observations(round_.number), self._batches.first.global_batch_size
        found = self._balancer.decide(
            round_.number, pulse.num_observations, seen, batch_size, round_.hosts, pulse.largest_shares
        )
        return position.speeds if found is None else found

    def take(self, voted: Sequence[int]) -> None:
        """Split the next batches by the speeds that rank 0 has put into a vote."""
        position = self._position
        speeds = tuple(voted) if len({*voted}) > 1 else ()
        if speeds == position.speeds or NO_SPEED in speeds or position.formation is None:
            return
        position.speeds = speeds
        self._pulse.shares_changed()
        for loader in self._batches.all:
            loader.divide(speeds)
        self._batches.prepare_next()
        if position.rank == 0:
            self._report(position.formation)

    def _report(self, formation: Formation) -> None:
        batch_size, size = self._batches.first.global_batch_size, formation.size
        samples: list[int] = []
        text = f"equal shares again: each worker takes {batch_size / size:.6g} of {batch_size} samples"
        if self._position.speeds:
            ranges = [share(batch_size, rank, size, self._position.speeds) for rank in range(size)]
            samples = [stop - start for start, stop in ranges]
            slow = [f"rank {rank} takes {number}" for rank, number in enumerate(samples) if number < batch_size // size]
            more = f" and {len(slow) - MAX_NAMED} others fewer, too," if len(slow) > MAX_NAMED else ""
            text = (
                f"shares by speed: {', '.join(slow[:MAX_NAMED])}{more} of {batch_size} samples, the others up to {max(samples)}"
            )
        self._world.event(SharesChanged(formation.round.number, self._batches.batch_number, samples), text)


# Agree with the other workers between steps: whether to stop or save, and that learning rates, rows and weights are equal.
#
# Each vote on the round carries numbers. A worker receives the minimum of each over all workers one vote later.


@dataclass(eq=False)
class Votes:
    """One worker's numbers in the votes, and the actions that follow from the results."""

    _world: World
    _collectives: ResilientCollectives
    _batches: TrainLoaders
    _trainer: TrainerOfFit
    _position: FitPosition
    _pulse: Pulse
    _kept: KeptValues
    _wants_stop: bool = False  # `should_stop` was set on this worker and not on all
    _fit_of_vote: int = 0  # `fit` of the script at the newest vote's beginning
    saved_request: int = 0  # newest request for a checkpoint that was carried out

    def __post_init__(self) -> None:
        self._drift = DriftCheck(self._world, self._batches, self._trainer, self._position)
        self._shares = SpeedShares(self._world, self._batches, self._trainer, self._position, self._pulse)

    def begin_fit(self) -> None:
        self._drift.begin_fit()
        self._wants_stop = False
        self._position.stopped_at = ""

    def wishes(self) -> list[int]:
        """Return this worker's numbers for a vote that begins."""
        position, formation = self._position, self._position.formation
        assert formation is not None
        self._fit_of_vote = position.fit
        load = self._pulse.encode(formation.round.number, position.rank, position.size, self._shares.largest_share())
        tables = self._trainer.elastic_tables
        equal = rates_digest(self._trainer.optimizers) ^ digest(self._batches.all) ^ self._drift.ballot()
        request = self._world.records.checkpoint_request()
        mine = [-int(self._kept.has_values), -int(self._wants_stop), equal, -equal, request]
        return [*(tables.wishes() if tables is not None else []), *mine, *load, *self._shares.ballot()]

    def count(self, step_time_s: float) -> bool:
        """Carry out the result of a vote, if there is one. Return whether a checkpoint was requested.

        Raises:
            UnsupportedScriptError: the workers' learning rates differ, or their weights.
            MembershipError: they have read different rows of an `IterableDataset`.
        """
        size = self._position.size
        voted, num_said = self._world.wishes, NUM_PER_WORKER * size
        if not voted:
            return False
        wishes, speeds = voted[:-size], voted[-size:]
        # The first vote may have begun in an earlier fit, with a model that had tables.
        self._world.wishes = wishes[: -num_said - 5] if self._trainer.elastic_tables is not None else []
        if wishes[-num_said - 3] != -wishes[-num_said - 2]:
            by_rank = transfer.all_gather(rates(self._trainer.optimizers))
            if (error := different_rates(by_rank, self._position.rank)) is not None:
                raise error
            refuse_different_rows(self._batches.all)
            self._drift.examine()
        if wishes[-num_said - 4] and self._fit_of_vote == self._position.fit:  # else the vote began in an earlier fit
            self._wants_stop, self._trainer.lightning.should_stop = False, True
        self._kept.are_needed = bool(wishes[-num_said - 5])
        self._pulse.decode(wishes[-num_said:], step_time_s, self._position.speeds)
        if self._fit_of_vote == self._position.fit:
            self._shares.take(speeds)
        request = wishes[-num_said - 1]
        is_new = request > self.saved_request
        self.saved_request = max(self.saved_request, request)
        return is_new

    def agree_on_stop(self, phase: str) -> None:
        """Let `trainer.should_stop` end the loops on all workers at one place.

        If all workers have set it, as Lightning's own callbacks do, they stop here. Otherwise the workers without it are a step
        ahead by the time this is noticed, so all stop after the next vote.
        """
        trainer, position = self._trainer.lightning, self._position
        is_alone = not position.has_entered or position.size == 1
        if not trainer.should_stop or is_alone or not trainer.fit_loop._can_stop_early:
            return
        place = f"stop/{position.fit}/{phase}/{position.batch}"
        while (reached := self._collectives.attempt(self._world.all_reach, place)) is None:
            self._collectives.recover()
            if self._have_stopped(place):
                reached = (True,)
                break
        if reached[0]:
            position.stopped_at = place
            return
        if not self._wants_stop:
            log.warning("worker %s: trainer.should_stop was not set on all workers; all will stop soon", self._world.worker_id)
        trainer.should_stop, self._wants_stop = False, True

    def _have_stopped(self, place: str) -> bool:
        """Return whether members of the new round found all workers at `place` before the former round broke."""
        formation = self._position.formation
        assert formation is not None
        positions = (Position.decode(hello) for hello in formation.hellos.values())
        return any(position is not None and position.stopped_at == place for position in positions)
