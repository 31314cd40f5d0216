"""Objects with tensors between two real gloo processes."""

from __future__ import annotations

import os
from argparse import Namespace
from collections import Counter, OrderedDict
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_dlrover.rdzv.transport.transfer import INLINE_BYTES, TransferError, _packed, loads
from tests.support.warm_process import WarmProcess, run_code

BOTH = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from lightning_dlrover.rdzv.transport import data_unpickler, transfer

rank, folder = int(sys.argv[1]), sys.argv[2]
from tests.rdzv.transport import test_transfer

store = dist.FileStore(folder + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
if rank == 0:
    for message in test_transfer.messages():
        transfer.send(message, 1)
    kept = test_transfer.messages()[-1]
    transfer.send(kept, 1)
    for message in test_transfer.refused():
        transfer.send(message, 1)
else:
    received = [transfer.receive(0) for _ in test_transfer.messages()]
    test_transfer.check(received)
    transfer.receive(0)
    for _ in test_transfer.refused():
        try:
            print("not refused:", transfer.receive(0))
        except transfer.TransferError as error:
            print("refused:", error)
assert transfer.all_gather({"rank": rank, "t": torch.full((2000,), rank)}) == [
    {"rank": r, "t": test_transfer.Same(torch.full((2000,), r))} for r in range(2)
]
of_ranks = [{"rank": r, "t": test_transfer.Same(torch.full((2000,), r))} for r in range(2)]
for ranks in ([], [0], [1], [1, 0]):
    found = transfer.gather_from(ranks, {"rank": rank, "t": torch.full((2000,), rank)})
    assert found == {r: of_ranks[r] for r in ranks}, found
assert transfer.largest([rank, -rank, 2**40 * rank, 5]) == [1, 0, 2**40, 5]
for source in range(2):
    for message in test_transfer.broadcast():
        test_transfer.assert_equal(transfer.broadcast_object(message if rank == source else None, source), message)
    for message in test_transfer.refused():
        try:
            print("not refused:", transfer.broadcast_object(message if rank == source else None, source))
        except transfer.TransferError as error:
            print("broadcast refused:", error)
data_unpickler.accept_only_data()
gathered = [None, None]
dist.all_gather_object(gathered, test_transfer.messages())
test_transfer.check(gathered[1 - rank])
for message in test_transfer.refused():
    try:
        dist.all_gather_object(gathered, message)
        print("not refused:", gathered)
    except transfer.TransferError as error:
        print("gather refused:", error)
dist.barrier()
dist.destroy_process_group()
"""

BIG = INLINE_BYTES  # elements: several times the limit for any type


def messages() -> list[object]:
    """Typical contents of training states: nested containers, shared, strided, empty and odd tensors."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(BIG, 3, generator=generator)
    return [
        None,
        {"a": [1, "two", (3.0, None)], "b": b"bytes"},
        {"small": torch.arange(3), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 7)},
        {"big": weight, "step": 3, "nested": [{"more": torch.arange(BIG)}]},
        {"transposed": weight.t(), "strided": weight[::2], "view": weight[5]},
        {"same": weight, "again": weight},
        [torch.ones(BIG, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float64)],
        {"parameter": torch.nn.Parameter(weight), "needs_grad": weight.clone().requires_grad_()},
        {"complex": torch.complex(weight, weight), "sparse": torch.eye(4).to_sparse()},
        *plain_values(),
        torch.optim.Adam([torch.nn.Parameter(weight.clone())]).state_dict(),
    ]


def broadcast() -> list[object]:
    """Messages of every kind and length: in one part, in two parts, with tensors."""
    texts = [None, True, 2**70, -1.5, "", "a name", "\u00e9" * 300, "x" * 502, "x" * 503, "x" * 100_000, "\ud800"]
    return [*texts, ("a", b"b"), float("inf"), *messages()]


class Evil:
    """Runs code when it is unpickled, as anything that a pickle can name may do."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("code of another worker was run",))


def refused() -> list[object]:
    return [Evil(), {"nested": [torch.ones(3), Evil()]}, os.system, torch.load, Same(torch.ones(1))]


class Same:
    """Equal to a tensor of the same values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Tensor) and torch.equal(other, self.tensor)


def plain_values() -> list[object]:
    """Values that users' hooks put into checkpoints."""
    return [
        {
            "path": Path("/a/b"),
            "when": datetime(2026, 1, 2),
            "sizes": frozenset({1}),
            "range": range(3),
            "name": Namespace(a=[1]),
        },
        {"float": np.float64(2.5), "array": np.arange(6).reshape(2, 3).tolist(), "bool": np.bool_(True), "none": float},
        OrderedDict(a=Counter("abca")),
    ]


def check(received: list[object]) -> None:
    expected = messages()
    assert len(received) == len(expected)
    for got, sent in zip(received, expected, strict=True):
        assert_equal(got, sent)
    shared = received[5]
    assert isinstance(shared, dict)
    assert shared["same"] is shared["again"]


def assert_equal(got: object, sent: object) -> None:
    if isinstance(sent, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        assert got.dtype == sent.dtype
        assert got.layout == sent.layout
        assert torch.equal(got.to_dense(), sent.to_dense())
    elif isinstance(sent, dict):
        assert isinstance(got, dict)
        assert list(got) == list(sent)
        for key in sent:
            assert_equal(got[key], sent[key])
    elif isinstance(sent, list):
        assert isinstance(got, list)
        for got_item, sent_item in zip(got, sent, strict=True):
            assert_equal(got_item, sent_item)
    else:
        assert got == sent


@pytest.mark.usefixtures("fork_server")
def test_training_state_arrives_as_it_was_sent(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    outputs = [tmp_path / f"{rank}.out" for rank in range(2)]
    processes = [
        WarmProcess(run_code, [BOTH, str(rank), str(tmp_path)], environment, output) for rank, output in enumerate(outputs)
    ]
    try:
        codes = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    texts = [output.read_text() for output in outputs]
    assert codes == [0, 0], "\n".join(texts)
    for text, kinds in ((texts[0], {"broadcast refused": 2, "gather refused": 1}), (texts[1], {"refused": 1})):
        answers = [line for line in text.splitlines() if "refused" in line or "code of" in line]
        counts = Counter(line.split(":")[0] for line in answers)
        assert {kind: counts[kind] for kind in kinds} == {kind: n * len(refused()) for kind, n in kinds.items()}, text
        assert {*counts} <= {"refused", "broadcast refused", "gather refused"}, text
    # The sender and the receivers learn the class and the next move.
    for text in texts:
        told = [line for line in text.splitlines() if line.startswith("broadcast refused: rank 1")]
        assert f"contains {__name__}.Same, a type not allowed in transfers; if it is harmless, allow it" in told[-1]
        assert "add_safe_globals([Same])" in told[-1]


@pytest.mark.parametrize("sent", [Evil(), [Same(torch.ones(1))], eval, Path.home])
def test_object_that_is_no_data_is_refused_with_the_next_move(sent: object) -> None:
    with pytest.raises(TransferError, match=r"contains \S+, a type not allowed in transfers; (if it is harmless|keep it)"):
        loads(_packed(sent)[0])


@pytest.mark.parametrize("body", [b"", b"PK\x03\x04", b"\x80\x02X\x04\x00", bytes(range(256)) * 8])
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    with pytest.raises(TransferError, match="what is not data"):
        loads(body)


def test_a_view_of_a_large_tensor_does_not_take_all_of_it_along() -> None:
    body, large = _packed({"row": torch.zeros(1000, 1000)[3]})
    assert len(body) < 8 * INLINE_BYTES
    assert large == []


def test_state_dict_keeps_its_versions() -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    assert loads(_packed(state)[0])._metadata == state._metadata  # type: ignore[attr-defined]
