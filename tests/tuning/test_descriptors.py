"""Facts that one watched forward pass yields about a model. The expected figures are computed by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_dlrover.tuning.profiler import Descriptors, ForwardWatch, dense_gradient_bytes, embedding_bytes

SAMPLES = 6


def watched(module: nn.Module, run: Callable[[], object]) -> Descriptors:
    watch = ForwardWatch(module)
    with watch:
        run()
    return watch.descriptors(SAMPLES)


def test_flops_are_three_times_those_of_the_forward_pass() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))
    found = watched(model, lambda: model(torch.randn(SAMPLES, 10)))
    assert found == Descriptors(dense_flops=3 * 2 * (10 * 20 + 20 * 3), lookups_per_sample=0.0)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_model_is_counted_as_torchs_own_counter_does(layers: int) -> None:
    blocks = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 32)]
    model = nn.Sequential(*blocks, *[nn.Linear(32, 32) for _ in range(layers)])
    rows = torch.randn(SAMPLES, 3, 8, 8)
    with FlopCounterMode(display=False) as counter:
        model(rows).sum().backward()
    found = watched(model, lambda: model(rows))
    # The first layer needs no gradient of its input, so three times the forward pass is slightly more.
    assert counter.get_total_flops() / SAMPLES <= found.dense_flops <= 1.3 * counter.get_total_flops() / SAMPLES


def test_attention_counts_on_cpu_too() -> None:
    heads, length, width = 4, 16, 8
    query = torch.randn(SAMPLES, heads, length, width, requires_grad=True)
    attention = nn.functional.scaled_dot_product_attention
    found = watched(nn.Identity(), lambda: attention(query, query, query))
    assert found.dense_flops == 3 * 2 * 2 * heads * length * length * width


def test_lookups_are_rows_that_a_sample_reads() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(100, 8), "tags": nn.EmbeddingBag(50, 4, mode="sum", sparse=True)})

    def run() -> None:
        model["words"](torch.randint(0, 100, (SAMPLES, 3)))
        model["tags"](torch.arange(4 * SAMPLES), torch.arange(0, 4 * SAMPLES, 4))

    assert watched(model, run) == Descriptors(dense_flops=0, lookups_per_sample=7.0)
    assert embedding_bytes(model) == 4 * (100 * 8 + 50 * 4)
    assert dense_gradient_bytes(model, sharded=()) == 4 * 100 * 8
    assert dense_gradient_bytes(model, sharded={"words.weight"}) == 0


def test_a_backward_pass_inside_of_the_step_is_not_counted_again() -> None:
    """Manual optimization runs its backward pass inside the step."""
    model = nn.ModuleDict({"tags": nn.EmbeddingBag(50, 4, mode="sum"), "net": nn.Linear(4, 3)})

    def forward() -> torch.Tensor:
        result: torch.Tensor = model["net"](model["tags"](torch.arange(4 * SAMPLES), torch.arange(0, 4 * SAMPLES, 4)))
        return result.sum()

    assert watched(model, lambda: forward().backward()) == watched(model, forward)  # type: ignore[no-untyped-call]


def test_a_step_that_is_made_again_counts_once() -> None:
    model = nn.Linear(10, 20)
    watch = ForwardWatch(model)
    for _ in range(2):
        with watch:
            model(torch.randn(SAMPLES, 10))
    assert watch.descriptors(SAMPLES).dense_flops == 3 * 2 * 10 * 20


def test_observed_pass_has_the_results_of_an_unobserved_one() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Dropout(0.5))
    rows = torch.randn(SAMPLES, 10)
    results = []
    for watch in (ForwardWatch(model), None):
        torch.manual_seed(3)
        if watch is None:
            results.append(model(rows))
        else:
            with watch:
                results.append(model(rows))
        results[-1].sum().backward()
    assert torch.equal(results[0], results[1])


def test_an_error_of_the_model_comes_through_and_ends_the_watch() -> None:
    watch = ForwardWatch(nn.Linear(2, 2))
    with pytest.raises(ArithmeticError, match="the model's own"), watch:
        raise ArithmeticError("the model's own")
    before = watch.flops
    nn.Linear(2, 2)(torch.ones(1, 2))
    assert watch.flops == before


def test_sharded_tables_are_counted_whole_and_their_lookups_by_feature() -> None:
    torchrec = pytest.importorskip("torchrec", reason="needs torchrec")
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from lightning_dlrover.tables.sharded import ShardedTables

    tables = [
        torchrec.EmbeddingBagConfig(name="t1", num_embeddings=100, embedding_dim=8, feature_names=["a", "b"]),
        torchrec.EmbeddingBagConfig(name="t2", num_embeddings=60, embedding_dim=8, feature_names=["b"]),
    ]
    model = nn.ModuleDict({"tables": torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))})
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["a", "b", "unused"],
        values=torch.randint(0, 60, (SAMPLES * (2 + 1 + 5),)),
        lengths=torch.tensor([2] * SAMPLES + [1] * SAMPLES + [5] * SAMPLES),
    )
    if dist.is_initialized():  # a Trainer in another test has left its group to the process
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        sharded = ShardedTables(model, torch.device("cpu"))
        sharded.build(sharded.first_plan(["w"]), ["w"], lambda module, _: module)
        assert watched(model, lambda: model["tables"](features).wait()).lookups_per_sample == 2 + 1 + 1
        assert embedding_bytes(model) == 4 * 8 * (100 + 60)
        assert dense_gradient_bytes(model, sharded.parameter_names()) == 0
    finally:
        dist.destroy_process_group()
