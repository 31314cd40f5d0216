"""Objects with tensors between two real gloo processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from lightning_dlrover.rdzv.transfer import INLINE_BYTES

BOTH = """
import pickle, sys
from datetime import timedelta
import torch, torch.distributed as dist
from lightning_dlrover.rdzv import transfer

rank, folder = int(sys.argv[1]), sys.argv[2]
sys.path.insert(0, sys.argv[3])
import test_transfer

store = dist.FileStore(folder + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
if rank == 0:
    for message in test_transfer.messages():
        transfer.send(message, 1)
    kept = test_transfer.messages()[-1]
    transfer.send(kept, 1)
else:
    received = [transfer.receive(0) for _ in test_transfer.messages()]
    test_transfer.check(received)
    transfer.receive(0)
dist.barrier()
dist.destroy_process_group()
"""

BIG = INLINE_BYTES  # elements: several times the limit for any type


def messages() -> list[object]:
    """What training states hold: nested containers, shared, strided, empty and odd tensors."""
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
        torch.optim.Adam([torch.nn.Parameter(weight.clone())]).state_dict(),
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


def test_whatever_a_training_state_holds_arrives_as_it_was_sent(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BOTH, str(rank), str(tmp_path), str(Path(__file__).parent)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    finally:
        for process in processes:
            process.kill()
