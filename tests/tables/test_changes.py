"""The next snapshot needs only the changes since the previous one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_dlrover.tables.exchange import Block
from lightning_dlrover.tables.layout import Region
from lightning_dlrover.tables.snapshot_store import (
    PartHeader,
    SnapshotError,
    SnapshotStore,
    changes_of,
    part_header,
    put_changes,
    size_of_changes,
)

ROWS, COLS = 50, 4
REGION = Region(0, ROWS, 0, COLS)


def shards(seed: int) -> list[Block]:
    random = torch.Generator().manual_seed(seed)
    return [
        Block("t", "weight", REGION, torch.rand(ROWS, COLS, generator=random)),
        Block("t", "state0", REGION, torch.rand(ROWS, generator=random)),
    ]


def header(blocks: list[Block], batch: int, owner: str = "a", state: bytes = b"state") -> PartHeader:
    return part_header(batch, 1, ["a", "b"], owner, {}, blocks, len(state))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changed=st.lists(st.lists(st.integers(0, ROWS - 1), unique=True), min_size=3, max_size=6),
    whole=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_a_copy_that_is_sent_changes_only_is_the_part_itself(
    tmp_path_factory: pytest.TempPathFactory, changed: list[list[int]], whole: list[bool]
) -> None:
    root = tmp_path_factory.mktemp("memory")
    own, other = SnapshotStore("job", "a", 1 << 24, root=root), SnapshotStore("job", "b", 1 << 24, root=root)
    blocks = shards(0)
    history: list[set[int]] = []
    keep = None
    for batch, rows in enumerate(changed):
        for row in rows:
            for block in blocks:
                block.values[row] += 1
        history.append(set(rows))
        since_base = torch.tensor(sorted(history[-1] | (history[-2] if batch else set())), dtype=torch.int64)
        state = f"state {batch}".encode()
        writer = own.begin(header(blocks, batch, state=state), keep)
        use = since_base if writer.base is not None and not whole[batch] else None
        assert (writer.base is not None) == (batch >= 2)
        for block in blocks:
            writer.put_block(block, use)
        writer.put([], state)
        part = writer.commit()
        copy = other.begin(part.header, keep)
        assert copy.base == writer.base
        if copy.base is None:
            copy.values.copy_(part.values)
        else:
            changes = changes_of(part, [use, use])
            counts = [-1 if use is None else len(use)] * 2
            assert len(changes) == size_of_changes(part.header, counts)
            put_changes(copy, counts, changes)
        received = copy.commit()
        for mine, theirs, live in zip(part.blocks(), received.blocks(), blocks, strict=True):
            assert torch.equal(mine.values, live.values)
            assert torch.equal(theirs.values, live.values)
        assert received.state().numpy().tobytes() == state
        keep = part.header.name


def test_other_shards_in_the_slot_are_not_a_base(tmp_path: Path) -> None:
    store = SnapshotStore("job", "a", 1 << 24, root=tmp_path)
    blocks = shards(0)
    for batch in range(2):
        writer = store.begin(header(blocks, batch), None)
        writer.put(blocks, b"state")
        writer.commit()
    smaller = [replace(b, region=Region(0, 10, 0, COLS), values=b.values[:10]) for b in blocks]
    assert store.begin(header(smaller, 2), None).base is None


def test_an_unfinished_part_is_not_a_base(tmp_path: Path) -> None:
    store = SnapshotStore("job", "a", 1 << 24, root=tmp_path)
    blocks = shards(0)
    kept = store.begin(header(blocks, 1), None)
    kept.put(blocks, b"state")
    name = kept.commit().header.name
    store.begin(header(blocks, 2), name)  # writing is interrupted
    assert store.begin(header(blocks, 3), name).base is None


@pytest.mark.parametrize("counts", [[], [1], [1, -2], [51, 0], [True, 1], ["1", 1]])
def test_impossible_numbers_of_rows_are_refused(counts: list[int]) -> None:
    with pytest.raises(SnapshotError, match="impossible"):
        size_of_changes(header(shards(0), 1), counts)
