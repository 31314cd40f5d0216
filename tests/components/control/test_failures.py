"""Classification of failures as one and the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.components.control.reconcile import likeness

SAME = [
    "RuntimeError: DataLoader worker (pid(s) {}417, {}5) exited unexpectedly",
    "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:{}] Connection closed by peer [127.0.0.1]:{}123",
    "ConnectionError: 10.0.0.{}:{}000 does not answer",
    "ConnectionError: [fe80::{}]:80 does not answer",
    "OSError: [Errno 28] No space left on device: '/tmp/x-{}/a b'",
    "FileNotFoundError: s3://bucket/run-{}/last.ckpt",
    "RuntimeError: <object at 0x7f{}a>",
    "RuntimeError: worker host-1f6ca7b{}e is gone",
    "RuntimeError: no answer after {}.25 s, at 2026-11-2{} 10:0{}:00.123",
]


@pytest.mark.parametrize("text", SAME)
def test_likeness_ignores_variable_parts(text: str) -> None:
    assert likeness(text.replace("{}", "1")) == likeness(text.replace("{}", "2"))


def test_numbers_of_either_sign_are_alike() -> None:
    texts = ("the first one being [0.12, -1.3e-05] here", "the first one being [-2.5, 3] here")
    assert likeness(texts[0]) == likeness(texts[1])
    assert likeness("round-2") != likeness("round2")


def test_likeness_keeps_the_cause() -> None:
    texts = [
        "KeyError: 'label'",
        "KeyError: 'added'",  # hex digits alone are not a number
        "ValueError: bad",
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.",
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.",
        "the script was ended by SIGSEGV",
        "the script was ended by SIGABRT",
        *SAME,
    ]
    assert len({likeness(text) for text in texts}) == len(texts)
    assert likeness("KeyError: 'label'") == "KeyError: 'label'"


@given(st.text(max_size=300))
def test_likeness_of_a_likeness_is_itself(text: str) -> None:
    assert likeness(likeness(text)) == likeness(text)
