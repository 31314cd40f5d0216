"""Tables on disk are read completely and into their own model, or not at all."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torchrec", reason="sharded tables need torchrec")

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim import RowWiseAdagrad

from lightning_dlrover.tables.checkpoint import CheckpointError, load_tables, save_tables
from lightning_dlrover.tables.sharded import ShardedTables

OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}


class Model(nn.Module):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=50, feature_names=["f"])
        self.tables = EmbeddingBagCollection(device=torch.device("meta"), tables=[config])
        _apply_optimizer_in_backward(OPTIMIZERS[optimizer], self.tables.parameters(), {"lr": 0.1})


@pytest.fixture(autouse=True)
def one_worker() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def built(optimizer: str) -> ShardedTables:
    tables = ShardedTables(Model(optimizer), torch.device("cpu"))
    tables.build(tables.first_plan(["w"]), ["w"])
    for number, block in enumerate(tables.blocks()):
        block.values.fill_(float(number + 1))
    return tables


@pytest.mark.parametrize("saved", OPTIMIZERS)
@pytest.mark.parametrize("loaded", OPTIMIZERS)
def test_a_state_is_read_as_it_was_written_or_its_checkpoint_is_refused(tmp_path: Path, saved: str, loaded: str) -> None:
    save_tables(built(saved), tmp_path)
    tables = built(loaded)
    for block in tables.blocks():
        block.values.zero_()
    if loaded not in (saved, "sgd"):  # sgd has no state
        with pytest.raises(CheckpointError, match="another optimizer"):
            load_tables(tables, tmp_path)
        return
    load_tables(tables, tmp_path)
    assert [bool((b.values == float(i + 1)).all()) for i, b in enumerate(tables.blocks())] == [True] * len(tables.blocks())


def test_counted_steps_come_back_with_the_tables(tmp_path: Path) -> None:
    """Row-wise Adagrad is the one optimizer that counts on CPU; on a GPU Adam and LAMB do."""
    tables = built("rowwise_adagrad")
    tables.set_counters({"tables.t": 7})
    save_tables(tables, tmp_path)
    again = built("rowwise_adagrad")
    assert again.counters() == {"tables.t": 0}
    load_tables(again, tmp_path)
    assert again.counters() == {"tables.t": 7}


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (str(self.mark), 0o700)


@pytest.mark.parametrize("where", ["list", "part"])
def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path: Path, where: str) -> None:
    folder, mark = tmp_path / "checkpoint", tmp_path / "was_run"
    tables = built("rowwise_adagrad")
    save_tables(tables, folder)
    parts = folder / ".metadata"
    found: Metadata = pickle.loads(parts.read_bytes())
    if where == "list":
        found.planner_data = Evil(mark)
    else:
        # A part that is not a tensor, in place of a counter.
        found.state_dict_metadata["counter/tables.t"] = BytesStorageMetadata()
        (folder / "evil").write_bytes(file_of(Evil(mark)))
        place = next(info for index, info in found.storage_data.items() if index.fqn == "counter/tables.t")
        evil = replace(place, relative_path="evil", offset=0, length=(folder / "evil").stat().st_size)
        found.storage_data[MetadataIndex("counter/tables.t")] = evil
    parts.write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match="written by another program"):
        load_tables(tables, folder)
    assert not mark.exists()


def file_of(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def test_a_damaged_list_of_parts_is_named(tmp_path: Path) -> None:
    tables = built("sgd")
    save_tables(tables, tmp_path)
    parts = tmp_path / ".metadata"
    for content in (b"", parts.read_bytes()[:-20], b"garbage", pickle.dumps({"a": 1})):
        parts.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"\.metadata is (damaged|not the list)"):
            load_tables(tables, tmp_path)
