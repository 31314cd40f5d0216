"""A growing table as a dictionary in Python, and several workers' `Rows` that together must be equal to it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_dlrover.tables.growing_optimizers import RowOptimizer
from lightning_dlrover.tables.growing_rows import SECTIONS, Growth, Init, Rows, ids_of, keys_of, pack, sections_of

INIT = Init("uniform", -0.5, 0.5)
SEED = 11


def make_rows(dim: int, optimizer: RowOptimizer, growth: Growth) -> Rows:
    return Rows("table", dim, optimizer, growth, INIT, 64 << 20)


class Dictionary:
    """One row for each id, updated one by one."""

    def __init__(self, dim: int, optimizer: RowOptimizer, growth: Growth) -> None:
        self._dim, self._optimizer, self._growth = dim, optimizer, growth
        self._seen: Counter[int] = Counter()  # occurrences by id
        self.rows: dict[int, list[Tensor]] = {}  # weights and states by id
        self.shared: dict[int, list[Tensor]] = {}  # by section

    def _new(self, key: Tensor) -> list[Tensor]:
        weight = INIT.drawn(key.reshape(1), self._dim, SEED)
        states = [torch.zeros(1, width) for width in self._optimizer.widths(self._dim)]
        self._optimizer.begin(weight, states)
        return [weight, *states]

    def step(self, ids: Sequence[int], grad_of: dict[int, Tensor]) -> None:
        """Train on a batch; every occurrence of an id has the gradient `grad_of[id]`."""
        sums: dict[tuple[str, int], Tensor] = {}
        for id_, number in Counter(ids).items():
            self._seen[id_] += number
            key = keys_of(torch.tensor([id_]))
            if id_ not in self.rows and self._seen[id_] >= self._growth.min_count:
                self.rows[id_] = self._new(key)
            at = ("row", id_) if id_ in self.rows else ("shared", int(sections_of(key)))
            if at[0] == "shared" and at[1] not in self.shared:
                self.shared[at[1]] = self._new(torch.tensor(at[1] - (1 << 62)))
            sums[at] = sums.get(at, torch.zeros(1, self._dim)) + number * grad_of[id_]
        for (kind, number), grad in sums.items():
            weight, *states = (self.rows if kind == "row" else self.shared)[number]
            self._optimizer.update(weight, states, grad)


class Workers:
    """Several workers' rows: a step goes to the owners, and the number of workers may change."""

    def __init__(self, num: int, dim: int, optimizer: RowOptimizer, growth: Growth) -> None:
        self._make: Callable[[], Rows] = partial(make_rows, dim, optimizer, growth)
        self._dim = dim
        first = self._make()
        first.begin(SEED)
        self.workers = [first]
        self.resize(num)

    def ranges(self, num: int) -> list[tuple[int, int]]:
        size = -(-SECTIONS // num)
        return [(min(SECTIONS, i * size), min(SECTIONS, (i + 1) * size)) for i in range(num)]

    def resize(self, num: int, lost: Sequence[Rows] = ()) -> None:
        """Move the rows to `num` workers; the first ones stay. With `lost`, the rows come from these copies."""
        sources = lost or self.workers
        kept = [] if lost else self.workers[:num]
        new = kept + [self._make() for _ in range(num - len(kept))]
        parts = []
        for target, (first, end) in enumerate(self.ranges(num)):
            for source in sources:
                low, high = max(first, source.owned[0]), min(end, source.owned[1])
                if low < high and not (target < len(kept) and source is kept[target]):
                    parts.append((target, low, high, pack(source.columns, source.num_slots, source.filter, low, high)))
        for worker, owned in zip(new, self.ranges(num), strict=True):
            worker.own(*owned)
        for target, low, high, packed in parts:
            new[target].take(packed, low, high)
        for worker in new:
            worker.step, worker.seed = sources[0].step, SEED
        self.workers = new

    def copy(self) -> list[Rows]:
        """Return copies of all workers' rows, as a snapshot holds them."""
        copies = []
        for worker in self.workers:
            copy = self._make()
            copy.own(*worker.owned)
            first, end = worker.owned
            if first < end:
                copy.take(pack(worker.columns, worker.num_slots, worker.filter, first, end), first, end)
            copy.step = worker.step
            copies.append(copy)
        return copies

    def step(self, ids: Sequence[int], grad_of: dict[int, Tensor]) -> None:
        keys, counts = torch.unique(keys_of(torch.tensor(ids, dtype=torch.int64)), return_counts=True)
        by_key = {int(keys_of(torch.tensor([id_]))): grad for id_, grad in grad_of.items()}
        grads = torch.cat([by_key[int(key)] * count for key, count in zip(keys, counts, strict=True)])
        sections = sections_of(keys)
        for worker in self.workers:
            mine = ((sections >= worker.owned[0]) & (sections < worker.owned[1])).nonzero().flatten()
            slots, index = torch.unique(worker.slots_of(keys[mine], counts[mine]), return_inverse=True)
            summed = torch.zeros(len(slots), self._dim).index_add_(0, index, grads[mine])
            numbers = torch.zeros(len(slots), dtype=torch.int64).index_add_(0, index, counts[mine])
            worker.train(slots, summed, numbers)
            worker.evict()

    def found(self) -> dict[int, list[Tensor]]:
        """Return weights and states by id. Fails if an id has two rows, or a row is with a worker that does not own it."""
        rows: dict[int, list[Tensor]] = {}
        for worker in self.workers:
            keys = worker.columns["key"][SECTIONS : worker.num_slots]
            assert (worker.slots_of(keys) == torch.arange(SECTIONS, worker.num_slots)).all()
            sections = sections_of(keys)
            assert ((sections >= worker.owned[0]) & (sections < worker.owned[1])).all()
            for slot, id_ in enumerate(ids_of(keys).tolist(), SECTIONS):
                assert id_ not in rows
                rows[id_] = [column[slot : slot + 1] for column in (worker.columns["weight"], *worker.states)]
        return rows


def run_schedule(number: int, optimizer: RowOptimizer, dim: int = 4) -> list[str]:
    """Run a random schedule of steps, changes and losses on workers and on a dictionary. Return the differences."""
    rng = random.Random(number)
    growth = Growth(min_count=rng.choice([1, 1, 2, 3]))
    workers = Workers(rng.randint(1, 8), dim, optimizer, growth)
    dictionary = Dictionary(dim, optimizer, growth)
    ids = [rng.getrandbits(64) - (1 << 63) for _ in range(rng.randint(5, 60))] + [0, -1, (1 << 63) - 1, -(1 << 63)]
    snapshot, since = workers.copy(), []
    for _ in range(rng.randint(3, 12)):
        event = rng.random()
        if event < 0.6:
            batch = [ids[int(len(ids) * rng.random() ** 2)] for _ in range(rng.randint(1, 40))]
            grad_of = {id_: torch.tensor([[rng.gauss(0, 1) for _ in range(dim)]]) for id_ in set(batch)}
            workers.step(batch, grad_of)
            since.append((batch, grad_of))
            dictionary.step(batch, grad_of)
        elif event < 0.8:
            workers.resize(rng.randint(1, 8))
        elif event < 0.9:
            snapshot, since = workers.copy(), []
        else:  # a loss: back to the snapshot, and the same steps again
            workers.resize(rng.randint(1, 8), lost=snapshot)
            for batch, grad_of in since:
                workers.step(batch, grad_of)
            snapshot, since = workers.copy(), []
    found = workers.found()
    wrong = [f"schedule {number}: id {id_} is missing or too much" for id_ in found.keys() ^ dictionary.rows.keys()]
    for id_ in found.keys() & dictionary.rows.keys():
        for here, there in zip(found[id_], dictionary.rows[id_], strict=True):
            if not torch.allclose(here, there, rtol=1e-4, atol=1e-5):
                wrong.append(f"schedule {number}: id {id_} has {here.tolist()} instead of {there.tolist()}")
    for section, values in dictionary.shared.items():
        worker = next(w for w in workers.workers if w.owned[0] <= section < w.owned[1])
        if not torch.allclose(worker.columns["weight"][section], values[0][0], rtol=1e-4, atol=1e-5):
            wrong.append(f"schedule {number}: the shared row of section {section} differs")
    return wrong
