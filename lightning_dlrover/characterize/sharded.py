"""Tables divided over the workers, through the package's own sharding; the time of their exchanges is separate."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

from lightning_dlrover.characterize.model import LEARNING_RATE, Clock
from lightning_dlrover.characterize.point import Point
from lightning_dlrover.tables.layout import Shard
from lightning_dlrover.tables.sharded import ShardedTables

__all__ = ["TablesOverWorkers"]

REMOTE = "remote"
"""Placement of all tables on the last worker: the others look up at another process."""


class TablesOverWorkers:
    """One worker's part of tables that torchrec has sharded. Their optimizer runs in the backward pass."""

    def __init__(self, point: Point, device: torch.device) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from torchrec.distributed.planner.types import ParameterConstraints

        self._names = [f"t{i}" for i in range(point.num_sparse)]
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=point.rows, embedding_dim=point.dim, feature_names=[name])
            for name in self._names
        ]
        holder = nn.Module()
        collection = holder.tables = EmbeddingBagCollection(configs, device=torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": LEARNING_RATE})
        kind = "table_wise" if point.placement == REMOTE else point.placement
        rule = ParameterConstraints(sharding_types=[kind])
        self._sharded = ShardedTables(holder, device, dict.fromkeys(self._names, rule))
        members = [f"worker{i}" for i in range(point.num_workers)]
        plan = self._sharded.first_plan(members, point.batch // point.num_workers)
        if point.placement == REMOTE:
            plan = {
                name: dataclasses.replace(table, shards=tuple(Shard(members[-1], s.region) for s in table.shards))
                for name, table in plan.items()
            }
        self._sharded.build(plan, members)
        for block in self._sharded.blocks():
            block.values.fill_(0.01)  # touches all pages
        self._collection: Any = holder.tables
        self._lookups = point.lookups
        self._outputs: list[Tensor] = []
        self._leaves: list[Tensor] = []

    def look_up(self, ids: Tensor, clock: Clock | None) -> Tensor:
        from torchrec import KeyedJaggedTensor

        num_tables, samples, lookups = ids.shape
        lengths = torch.full((num_tables * samples,), lookups, dtype=torch.int64, device=ids.device)
        features = KeyedJaggedTensor(self._names, ids.flatten(), lengths=lengths)
        collection = self._collection
        context = collection.create_context()
        if clock is None:
            pooled = collection.output_dist(
                context, collection.compute(context, collection.input_dist(context, features).wait().wait())
            ).wait()
        else:
            clock.mark("embedding")
            local = collection.input_dist(context, features).wait().wait()
            clock.mark("communication")
            self._outputs = collection.compute(context, local)
            self._leaves = [output.detach().requires_grad_() for output in self._outputs]
            clock.mark("embedding")
            pooled = collection.output_dist(context, self._leaves).wait()
        values: Tensor = pooled.values().unflatten(1, (num_tables, -1))
        if clock is not None:
            clock.mark("communication")
        return values

    def backward(self, vectors: Tensor, gradient: Tensor, clock: Clock | None) -> None:
        torch.autograd.backward(vectors, gradient)
        if clock is not None:
            clock.mark("communication")
        torch.autograd.backward(self._outputs, [leaf.grad for leaf in self._leaves])

    def update(self, clock: Clock | None) -> None:
        """Do nothing: the backward pass has updated the rows."""

    def close(self) -> None:
        self._sharded.close()
