"""This worker's copy of the dense parameters: how DDP wraps it in each round."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.live.ddp_names import (
    ddp_arguments,
    register_comm_hook,
)
from lightning_dlrover.live.unused_parameters import UnusedParameters
from lightning_dlrover.rdzv.group import torch_names
from lightning_dlrover.rdzv.group.world import World

if TYPE_CHECKING:
    from lightning_dlrover.live.live_strategy import LiveStrategy

__all__ = ["Replica"]


class Replica:
    """The dense parameters of a strategy's model.

    Args:
        unused: whether DDP has to search for parameters that a step leaves out.
    """

    def __init__(self, strategy: LiveStrategy, unused: UnusedParameters) -> None:
        self.unused = unused
        self._strategy = strategy
        self._frozen: list[nn.Parameter] = []  # parameters that were not trainable when DDP wrapped the model

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
            init_sync: whether workers may have different parameters, which DDP makes alike.
        """
        strategy = self._strategy
        torch_names.retire(strategy.model)
        if strategy.world_size == 1:
            return module
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sharded)  # type: ignore[no-untyped-call]
        with ddp_arguments(strategy, init_sync=init_sync):
            wrapped = strategy._setup_model(module)
        if strategy.root_device.type == "cuda":  # the same as Lightning does for models without tables
            register_comm_hook(strategy, wrapped)
        return wrapped

    def wrap_anew(self, in_validation: bool = False) -> None:
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
        """Wrap the model anew if parameters were unfrozen since the last wrap.

        DDP reduces only the gradients of parameters that were trainable when it was made. The workers' weights would drift
        apart after a callback unfreezes layers while training. Manual optimization is left alone: it switches parameters on
        and off in each step, as Lightning's `toggle_optimizer` does.
        """
        strategy = self._strategy
        assert strategy.lightning_module is not None
        if strategy.tables is not None or strategy.world_size == 1 or not strategy.lightning_module.automatic_optimization:
            return
        if any(p.requires_grad for p in self._frozen):
            self.wrap_anew()

    def note_optimizers(self) -> None:
        """Wrap the model anew if its optimizers show that steps leave parameters out: Lightning wraps it before it has them."""
        strategy = self._strategy
        assert strategy.lightning_module is not None
        was_found = self.unused.found
        self.unused.note_optimizers(strategy.lightning_module.automatic_optimization, len(strategy.optimizers))
        if self.unused.found and not was_found and isinstance(strategy.model, DistributedDataParallel):
            self.wrap_anew()

    def check_backward(self) -> None:
        """Call after each backward pass.

        Raises:
            IncompleteBackwardError: DDP cannot complete its reduction.
        """
        strategy = self._strategy
        assert strategy.lightning_module is not None
        self.unused.check(
            strategy.lightning_module,
            strategy.model,
            strategy,
            strategy.world_size,
            strategy.is_global_zero,
        )
