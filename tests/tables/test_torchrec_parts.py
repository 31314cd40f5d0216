"""Names of torchrec's internals that we use. A release without one of them is refused by that name."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import pytest

pytest.importorskip("torchrec", reason="sharded tables need torchrec")

import torch
from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed import batched_embedding_kernel as kernels
from torchrec.distributed import collective_utils, comm, comm_ops
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel

from lightning_dlrover.tables.torchrec_build import one_worker_per_node, patched


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (DistributedModelParallel, "_sharded_parameter_names"),
        (DataParallelWrapper, "wrap"),
        (collective_utils, "_INITIALIZED"),
        (comm, "_INTRA_PG"),
        (comm, "_CROSS_PG"),
        (comm, "_INTRA_PG_2D"),
        (comm, "_CROSS_PG_2D"),
        (comm, "_NODE_GROUP_SIZE_2D"),
        (comm_ops, "dist"),
        (kernels, "SplitTableBatchedEmbeddingBagsCodegen"),
        (kernels.BaseBatchedEmbedding, "init_parameters"),
        (kernels.BaseBatchedEmbeddingBag, "init_parameters"),
        (ShardedEmbeddingCollection, "reset_parameters"),
        (ShardedEmbeddingBagCollection, "reset_parameters"),
        (EmbeddingCollectionSharder, "shard"),
        (EmbeddingBagCollectionSharder, "shard"),
        (training, "construct_split_state"),
    ],
)
def test_torchrec_has_the_name(owner: object, name: str) -> None:
    assert hasattr(owner, name)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (DistributedModelParallel, "_dmp_wrapped_module"),
        (ShardedEmbeddingCollection, "_lookups"),
        (ShardedEmbeddingBagCollection, "_lookups"),
        (kernels.BatchedFusedEmbedding, "_emb_module"),
        (kernels.BatchedFusedEmbeddingBag, "_emb_module"),
    ],
)
def test_torchrec_sets_the_attribute(owner: type, name: str) -> None:
    assert name in owner.__init__.__code__.co_names  # type: ignore[misc]


def test_collections_and_parameters_of_torchrec_have_the_attributes() -> None:
    device = torch.device("meta")
    sizes = {"num_embeddings": 2, "embedding_dim": 4, "name": "t", "feature_names": ["f"]}
    bag = EmbeddingBagCollection([EmbeddingBagConfig(**sizes)], device=device)
    collection = EmbeddingCollection([EmbeddingConfig(**sizes)], device=device)
    assert hasattr(bag, "_device")
    assert hasattr(collection, "_device")
    _apply_optimizer_in_backward(torch.optim.SGD, bag.parameters(), {"lr": 0.1})
    for parameter in bag.parameters():
        assert parameter._optimizer_classes == [torch.optim.SGD]
        assert parameter._optimizer_kwargs == [{"lr": 0.1}]
        assert hasattr(parameter, "_in_backward_optimizers")


def test_patched_attribute_is_as_before_afterwards() -> None:
    class Base:
        name = 1

    class Derived(Base):
        pass

    thing = SimpleNamespace(name=3)
    for owner in (Base, Derived, thing):
        before = dict(vars(owner))
        with contextlib.suppress(ZeroDivisionError), patched(owner, "name", 2):
            assert owner.name == 2
            _ = 1 / 0
        assert dict(vars(owner)) == before


def test_environment_is_as_before_once_tables_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv("TORCHREC_RESOLVED_POD_SIZE", raising=False)
    with one_worker_per_node():
        assert os.environ["LOCAL_WORLD_SIZE"] == os.environ["TORCHREC_RESOLVED_POD_SIZE"] == "1"
    assert os.environ["LOCAL_WORLD_SIZE"] == "4"
    assert "TORCHREC_RESOLVED_POD_SIZE" not in os.environ
