"""One worker's copy of the model: DDP's wrapper, buffers, unused parameters, device and memory. And the Trainer around it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover import variables
from lightning_dlrover.checks import UnsupportedScriptError
from lightning_dlrover.lightning_compat import EitherStrategy, package_of, submodule
from lightning_dlrover.live.lightning_adapter import ddp_arguments
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.transport import torch_names
from lightning_dlrover.tuning.resources import available_bytes

if TYPE_CHECKING:
    import lightning as L

    from lightning_dlrover.live.checkpoints import TablesOfTrainer
    from lightning_dlrover.live.lightning_adapter import EpochLoop
    from lightning_dlrover.tables.elastic import ElasticTables
    from lightning_dlrover.tuning.health import OwnClock
    from lightning_dlrover.tuning.profiler import StepTimes

# Decide whether DDP has to search each backward pass for parameters without a gradient.
#
# A process that trains alone needs no such search, so its script may leave parameters out of a step: a frozen branch, the
# other network of a GAN. DDP without the search waits for those gradients forever. Every worker therefore detects such
# parameters, alone and under DDP, and the workers of a round agree on the outcome through their positions.

log = logging.getLogger(__name__)

NUM_WATCHED = 50
"""Number of backward passes in which a worker that trains alone looks for parameters without a gradient."""

NUM_NAMED = 3
"""Maximum number of parameters that the report names."""


class IncompleteBackwardError(RuntimeError):
    """DDP waits for gradients that the backward pass did not produce. All workers have to repeat the step."""


class UnusedParameters:
    """Detects whether this job's models have parameters that a step may leave out.

    Args:
        ddp_kwargs: the user's arguments of DDP. A choice made there is kept.
        is_live: whether the world may change. Otherwise DDP stays as Lightning sets it up.
    """

    def __init__(self, ddp_kwargs: dict[str, Any], is_live: bool) -> None:
        self.is_fixed = not is_live or "find_unused_parameters" in ddp_kwargs or bool(ddp_kwargs.get("static_graph"))
        self.found = False  # whether DDP has to search for them from the next wrap on
        self._num_watched = 0

    def agree(self, found: bool, is_reporter: bool) -> None:
        """Adopt the common result of a new round's workers."""
        if self.is_fixed or found == self.found:
            return
        if found and is_reporter:
            log.info("DDP searches for unused parameters from now on: another worker has found some")
        self.found = found

    @contextlib.contextmanager
    def searching(self) -> Iterator[None]:
        """Run a backward pass with or without DDP's search.

        Raises:
            UnsupportedScriptError: the search has failed in reentrant checkpoints, which it cannot see through.
        """
        try:
            yield
        except RuntimeError as error:
            if self.is_fixed or not self.found or "ready only once" not in str(error):
                raise
            raise UnsupportedScriptError(
                "some steps leave parameters out, so DDP searches each backward pass for them, and that fails with activation "
                "checkpointing in its reentrant form: call torch.utils.checkpoint.checkpoint with use_reentrant=False (for "
                'models of transformers: gradient_checkpointing_kwargs={"use_reentrant": False})'
            ) from error

    def check(self, strategy: LiveStrategy) -> None:
        """Look for parameters without a gradient after a backward pass. Tables get none by design.

        Raises:
            IncompleteBackwardError: DDP cannot complete its reduction.
        """
        module, model = strategy.lightning_module, strategy.model
        if self.is_fixed or self.found:
            return
        assert module is not None
        if strategy.world_size == 1:
            if self._num_watched < NUM_WATCHED:
                self._num_watched += 1
                self.found = bool(_without_gradient(module, strategy.table_names))
            return
        if not isinstance(model, DistributedDataParallel) or not model.require_backward_grad_sync:
            return
        try:
            model._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            self.found = True
            names = _without_gradient(module, strategy.table_names)
            text = ", ".join(names[:NUM_NAMED]) + (f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else "")
            text = text or "some of those that another step has used"
            if strategy.is_global_zero:
                log.warning("This step does not use all parameters (%s): DDP searches for unused ones from now on", text)
            raise IncompleteBackwardError(f"the backward pass gave no gradient to {text}") from error


def _without_gradient(module: nn.Module, ignored: Collection[str]) -> list[str]:
    return [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None and name not in ignored]


# Take the buffers of a model, such as BatchNorm's means, from rank 0 before a validation.


def send_buffers(model: Any) -> dict[str, Tensor]:
    """Give all workers rank 0's buffers before a validation. Called where there are several workers.

    DDP does so in each worker's first forward pass. A worker without a sample of the first dataloader, or without any left
    after a loss, makes that pass later than the others or never. It would meet them in another collective.

    Args:
        model: the model that the workers train, in DDP if its gradients are reduced.

    Returns:
        A copy of the sent buffers, for a worker that did not receive them because of a loss; see `take_buffers`.
    """
    sent: dict[str, Tensor] = {}
    if isinstance(model, DistributedDataParallel):
        if model.broadcast_buffers and any(True for _ in model.module.buffers()):
            model._sync_buffers()  # type: ignore[no-untyped-call]
            sent = {name: buffer.detach().clone() for name, buffer in model.named_module_buffers.items()}
        model.require_forward_param_sync = False
    return sent


def take_buffers(module: nn.Module, sent: Mapping[str, Tensor]) -> None:
    """Set the buffers that `send_buffers` returned, here or on another worker."""
    own = dict(module.named_buffers())
    with torch.no_grad():
        for name, buffer in sent.items():
            own[name].copy_(buffer)


# Decide which device a worker trains on.


def own_device(devices: Sequence[torch.device], local_rank: int, num_gpus: int, backend: str | None = None) -> torch.device:
    """Return the device of the worker with this local rank.

    `Trainer(devices=...)` does not decide how many workers a node has, so there may be more workers than devices. NCCL refuses
    two workers on one GPU, so the extra workers get the GPUs that the Trainer was not given. Workers share a CPU. They also
    share GPUs if they communicate through gloo.

    Args:
        devices: devices of the Trainer.
        num_gpus: number of GPUs visible to this process.
        backend: the user's choice for the process groups; None: NCCL on GPUs.

    Raises:
        ValueError: this worker would have to share a GPU.
    """
    if devices[0].type != "cuda" or backend == "gloo":
        return devices[local_rank % len(devices)]
    others = [torch.device("cuda", i) for i in range(num_gpus) if all(device.index != i for device in devices)]
    own = [*devices, *others]
    if local_rank >= len(own):
        raise ValueError(
            f"the worker with local rank {local_rank} has no GPU of its own, as {len(own)} in all are visible to it, and NCCL "
            "refuses two workers on one GPU: start as many workers per node as it has GPUs (--nproc-per-node), show more of "
            "them in CUDA_VISIBLE_DEVICES, or share them with DLRoverStrategy(process_group_backend='gloo')"
        )
    return own[local_rank]


# Keep memory at hand for a change of the world.
#
# A page that a process touches for the first time costs microseconds, and many of them inside a virtual machine. For a
# model and its optimizer state these add up to the longest part of a switch. So a worker touches its future memory while no
# other worker waits for it, and makes the C library keep freed blocks.

# glibc's mallopt(3)
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
NEVER = 2**31 - 1
LARGEST_KEPT = 32 << 20
"""Bytes of the largest block to keep, as in glibc's adaptive threshold. Keeping larger ones would leave gaps in the heap."""

USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def reserve(
    module: torch.nn.Module, num_copies: int, but: Collection[str] = (), environ: Mapping[str, str] = os.environ
) -> bool:
    """Touch the module's trainable parameters, and `num_copies` times their memory for later allocations.

    Embeddings with sparse gradients do not count, because most of their memory is never touched. From then on the
    process keeps blocks below 32 MiB that it frees.

    Nothing is reserved if the C library is not glibc, if the user has allocation settings, or if all workers of the node
    would take more than half of the available memory. Processes forked afterwards share the pages, which undoes the work.

    Args:
        but: names of parameters that do not count: sharded tables, which have another kind of memory.

    Returns:
        Whether the memory was reserved.
    """
    libc = ctypes.CDLL(None)  # its calls release Python's lock, as touching may take seconds
    if not hasattr(libc, "gnu_get_libc_version") or any(environ.get(name) for name in USERS_OWN):
        return False
    sparse = {id(p) for m in module.modules() if getattr(m, "sparse", False) for p in m.parameters(recurse=False)}
    parameters = [
        p
        for name, p in module.named_parameters()
        if p.requires_grad and p.device.type == "cpu" and id(p) not in sparse and name not in but
    ]
    num_bytes = num_copies * sum(p.nbytes for p in parameters)
    if num_bytes * variables.workers_here(environ) > available_bytes() // 2:
        log.info("not enough memory is available to reserve %d MiB: changes of the world will take longer", num_bytes >> 20)
        return False
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    libc.mallopt(M_TRIM_THRESHOLD, NEVER)
    sizes = [min(LARGEST_KEPT // 2, num_bytes - done) for done in range(0, num_bytes, LARGEST_KEPT // 2)]
    blocks = [libc.malloc(size) for size in sizes]
    for block, size in zip(blocks, sizes, strict=True):
        if block:
            libc.memset(block, 0, size)
    for block in blocks:
        libc.free(block)
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1)
    return True


# The strategy and the Trainer as the parts of a live fit use them.


class LiveStrategy(EitherStrategy):
    """Base of `DLRoverStrategy`: the worker's place, and the names of sharded parameters."""

    replica: Replica
    times: StepTimes
    clock: OwnClock
    tables: TablesOfTrainer | None  # None if the model has none
    fingerprint: str  # identity of a model before its tables are sharded
    unread_checkpoint: tuple[int, str] | None  # step and folder of the user's checkpoint; a joiner skips it
    has_global_batch_size: bool
    compares_data: bool
    reruns_epoch_hooks: bool
    max_share: int | Literal["whole"] | None
    shares: Literal["by-speed", "equal"]
    on_drift: Literal["end", "repair", "ignore"]

    def enter_round(self, global_rank: int, world_size: int) -> None:
        """Take a place in a new round."""
        self.show_place(global_rank, world_size)
        self.set_world_ranks()

    def show_place(self, global_rank: int, world_size: int) -> None:
        """Set rank and size as the Trainer's attributes show them, to the user's code too."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(global_rank)
        self.cluster_environment.set_world_size(world_size)

    @property
    def own_place(self) -> tuple[int, int]:
        """This worker's rank, 0 if it is alone, and the number of workers."""
        return self.global_rank if self.world_size > 1 else 0, self.world_size

    @property
    def elastic_tables(self) -> ElasticTables | None:
        """The model's tables in a live job; None if it has none."""
        return self.tables.elastic if self.tables is not None else None

    @property
    def table_names(self) -> set[str]:
        """Names of the parameters that are torchrec's tables."""
        return self.tables.parameter_names() if self.tables is not None else set()

    @property
    def sharded_names(self) -> set[str]:
        """Names of the parameters that differ between workers."""
        return self.tables.sharded_names() if self.tables is not None else set()


@dataclass(frozen=True)
class TrainerOfFit:
    """One Trainer and its strategy. Both change while a `fit` runs, so every value is read when it is needed."""

    lightning: L.Trainer  # the Trainer itself, for code that uses its private names
    strategy: LiveStrategy

    @property
    def module(self) -> L.LightningModule:
        return self.lightning.lightning_module

    @property
    def is_automatic(self) -> bool:
        """Whether Lightning steps the optimizers, and not the user."""
        return self.module.automatic_optimization

    @property
    def optimizers(self) -> list[Any]:
        return self.lightning.optimizers

    @property
    def callbacks(self) -> list[Any]:
        return self.lightning.callbacks  # type: ignore[attr-defined, no-any-return]  # Lightning does not declare them

    @property
    def accumulate_grad_batches(self) -> int:
        return self.lightning.accumulate_grad_batches

    @property
    def global_step(self) -> int:
        return self.lightning.global_step

    @property
    def current_epoch(self) -> int:
        return self.lightning.current_epoch

    @property
    def epoch_loop(self) -> EpochLoop:
        return self.lightning.fit_loop.epoch_loop

    @property
    def num_handed_out(self) -> int:
        """Batches of this epoch that the loop has received, the one under computation included."""
        return self.epoch_loop.batch_progress.current.ready

    @property
    def results(self) -> Any:
        """Values that the training epoch has logged so far."""
        return self.epoch_loop._results

    @property
    def device(self) -> torch.device:
        return self.strategy.root_device

    @property
    def elastic_tables(self) -> ElasticTables | None:
        """The model's sharded tables; None if it has none."""
        return self.strategy.elastic_tables

    def log_for(self, kwargs: Any) -> None:
        """Make Lightning weight the next logged values by the size of the batch in these arguments of a training step."""
        results = self.results
        results.batch, results.batch_size = kwargs["batch"] if "batch" in kwargs else next(iter(kwargs.values())), None


# The worker's copy of the dense parameters: how DDP wraps it in each round.


@dataclass(eq=False)
class Replica:
    """The dense parameters of a strategy's model."""

    _strategy: LiveStrategy
    unused: UnusedParameters  # whether DDP has to search for parameters that a step leaves out
    _frozen: list[nn.Parameter] = field(default_factory=list)  # not trainable when DDP wrapped the model

    def wrap(
        self, module: nn.Module, make: Callable[[nn.Module], DistributedDataParallel], world: World | None
    ) -> DistributedDataParallel:
        """Put a module into DDP.

        Args:
            make: Lightning's own way.
        """
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        with ddp_arguments(self._strategy, **({"find_unused_parameters": True} if self.unused.found else {})):
            wrapped = make(module)
        self._strategy.clock.stop_in_forward(wrapped)
        if world is not None and self._strategy._ddp_comm_hook is None:
            world.guard(wrapped)
        return wrapped

    def wrap_beside_tables(self, module: nn.Module, sharded: list[str], init_sync: bool) -> nn.Module:
        """Put a module into DDP, except for its sharded tables.

        Args:
            sharded: names of their parameters.
            init_sync: whether workers may have different parameters, which DDP makes equal.
        """
        strategy = self._strategy
        torch_names.retire(strategy.model)
        if strategy.world_size == 1:
            return module
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sharded)  # type: ignore[no-untyped-call]
        with ddp_arguments(strategy, init_sync=init_sync):
            wrapped = strategy._setup_model(module)
        if strategy.root_device.type == "cuda":  # the same as Lightning does for models without tables
            register = submodule(package_of(strategy), "overrides.distributed")._register_ddp_comm_hook
            register(wrapped, strategy._ddp_comm_state, strategy._ddp_comm_hook, strategy._ddp_comm_wrapper)
        return wrapped

    def wrap_again(self, in_validation: bool = False) -> None:
        """Wrap the model for the current round. All workers have equal parameters already.

        Args:
            in_validation: whether any worker is in a validation, where `send_buffers` has sent the buffers. It must be equal on
                all workers: one that has already ended the validation makes its next forward pass together with the others'
                first one after it.
        """
        strategy = self._strategy
        assert strategy.lightning_module is not None
        if strategy.tables is not None:
            return  # the tables' build has wrapped it
        torch_names.retire(strategy.model)
        model: Any = strategy.lightning_module
        strategy.model = model
        strategy._pl_static_graph_delay_done = False  # a static graph needs a call for each replica, in manual optimization
        if strategy.world_size > 1:
            with ddp_arguments(strategy, init_sync=False):
                strategy.configure_ddp()
            if in_validation and isinstance(strategy.model, DistributedDataParallel):
                strategy.model.require_forward_param_sync = False

    def wrap_what_was_unfrozen(self) -> None:
        """Wrap the model again if parameters were unfrozen since the last wrap.

        DDP reduces only the gradients of parameters that were trainable when it was made. The workers' weights would drift
        apart after a callback unfreezes layers while training. Manual optimization is left alone: it switches parameters on
        and off in each step, as Lightning's `toggle_optimizer` does.
        """
        strategy = self._strategy
        assert strategy.lightning_module is not None
        if strategy.tables is not None or strategy.world_size == 1 or not strategy.lightning_module.automatic_optimization:
            return
        if any(p.requires_grad for p in self._frozen):
            self.wrap_again()

    def note_optimizers(self) -> None:
        """Expect unused parameters with several optimizers of manual optimization, each with its own part and backward pass.

        Lightning has wrapped the model before it has optimizers, so the model is wrapped again.
        """
        strategy, unused = self._strategy, self.unused
        assert strategy.lightning_module is not None
        is_automatic = strategy.lightning_module.automatic_optimization
        if unused.is_fixed or unused.found or is_automatic or len(strategy.optimizers) < 2:
            return
        unused.found = True
        if isinstance(strategy.model, DistributedDataParallel):
            self.wrap_again()
