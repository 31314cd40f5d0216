"""`torch.compile` compiles the same frames with the callback as without it, and follows the process group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy
from lightning_dlrover.tuning.profiler import Descriptors
from tests.support.quiet_trainer import quiet_trainer

Place = Literal["nowhere", "function", "full_graph", "submodule", "submodule_in_place", "model", "module"]
"""Place at which a script uses `torch.compile`."""

NUM_STEPS = 4


class Counter:
    """A backend that runs the graphs unchanged, and counts them."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        self.num_graphs += 1
        return graph.forward


class Net(nn.Module):
    """Dynamo leaves torch's own modules alone when they are compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.layers(rows)
        return result


class Model(L.LightningModule):
    def __init__(self, place: Place, backend: Counter) -> None:
        super().__init__()
        self.net: Any = Net()
        self.loss: Any = nn.functional.mse_loss
        if place in ("function", "full_graph"):
            self.loss = torch.compile(lambda x, y: ((x - y) ** 2).mean(), backend=backend, fullgraph=place == "full_graph")  # type: ignore[misc]
        elif place == "submodule":
            self.net = torch.compile(self.net, backend=backend)
        elif place == "submodule_in_place":
            self.net.compile(backend=backend)
        elif place == "module":
            self.compile(backend=backend)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        result: Tensor = self.loss(self.net(batch[0]), batch[0].sum(1, keepdim=True))
        return result

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(place: Place, callbacks: list[L.Callback]) -> int:
    """Number of compiled graphs of a short training."""
    torch._dynamo.reset()
    backend = Counter()
    model: Any = Model(place, backend)
    if place == "model":
        model = torch.compile(model, backend=backend)
    trainer = quiet_trainer(strategy=DLRoverStrategy(), callbacks=callbacks, max_steps=NUM_STEPS)
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8))
    assert trainer.global_step == NUM_STEPS
    return backend.num_graphs


@pytest.mark.parametrize("place", get_args(Place))
def test_callback_leaves_compilation_alone(place: Place) -> None:
    plain = trained(place, [])
    assert (plain > 0) == (place not in ("nowhere", "module"))  # the step is not a forward call
    callback = DLRoverCallback(plan_every_s=0)
    assert trained(place, [callback]) == plain
    # Observations of a compiled model do not describe it.
    assert (callback._descriptors == Descriptors()) == (place != "nowhere")


def test_graph_with_a_collective_is_compiled_again_for_the_next_round() -> None:
    """Dynamo keeps the process group in the graph, and compares it before each call."""
    backend = Counter()

    @torch.compile(backend=backend)
    def total(rows: Tensor) -> Tensor:
        summed = rows * 2
        dist.all_reduce(summed)
        return summed

    for number in (1, 2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        try:
            assert torch.equal(total(torch.ones(2)), torch.full((2,), 2.0))
        finally:
            dist.destroy_process_group()
        assert backend.num_graphs == number
