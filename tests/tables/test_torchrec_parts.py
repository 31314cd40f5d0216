"""Names of torchrec's internals that we use. A release without one of them is refused by that name."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torchrec", reason="sharded tables need torchrec")

import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

from lightning_dlrover.private_names import missing_names
from lightning_dlrover.tables.torchrec_adapter import NAMES, one_worker_per_node


def test_torchrec_has_the_names() -> None:
    assert missing_names(NAMES) == []


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


def test_environment_is_as_before_once_tables_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv("TORCHREC_RESOLVED_POD_SIZE", raising=False)
    with one_worker_per_node():
        assert os.environ["LOCAL_WORLD_SIZE"] == os.environ["TORCHREC_RESOLVED_POD_SIZE"] == "1"
    assert os.environ["LOCAL_WORLD_SIZE"] == "4"
    assert "TORCHREC_RESOLVED_POD_SIZE" not in os.environ
