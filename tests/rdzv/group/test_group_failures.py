"""Errors that end a round, as opposed to mistakes of the user's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from lightning_dlrover.rdzv.desync import MismatchError
from lightning_dlrover.rdzv.group.failures import MAX_ATTEMPTS, Failures, is_group_failure
from lightning_dlrover.rdzv.membership.member import WorldError


@pytest.mark.parametrize(
    "error, expected",
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2"), True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv"), True),
        (dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited or there was a network error"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (dist.DistBackendError("NCCL error: ncclInvalidUsage: Last error: Duplicate GPU detected : rank 1 and rank 0"), False),
        (
            dist.DistBackendError("NCCL error: unhandled cuda error, ncclUnhandledCudaError: Cuda failure 2 'out of memory'"),
            False,
        ),
        (RuntimeError("Distributed package doesn't have NCCL built in"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"), False),
        (ValueError("Connection closed by peer"), False),
        (KeyError("gloo/transport"), False),
    ],
)
def test_lost_peer_is_distinguished_from_a_users_mistake(error: Exception, expected: bool) -> None:
    assert is_group_failure(error) is expected


# --- recoverable errors ---------------------------------------------------------------------------------------------------


def failures_of_a_round(is_broken: bool) -> Failures:
    return Failures(cast(Any, SimpleNamespace(are_severed=is_broken)), lambda: None)


def missing_group() -> Exception:
    """Return torch's error after the default group was aborted."""
    with pytest.raises(ValueError, match="Default process group has not been initialized") as raised:
        dist.all_reduce(torch.ones(1))
    return raised.value


def test_missing_group_is_a_loss_in_a_broken_round_only() -> None:
    assert failures_of_a_round(is_broken=True).is_failure(missing_group())
    assert not failures_of_a_round(is_broken=False).is_failure(missing_group())
    assert not failures_of_a_round(is_broken=True).is_failure(ValueError("a mistake of the user's"))


def test_mismatch_is_no_loss_though_the_round_is_broken() -> None:
    assert not failures_of_a_round(is_broken=True).is_failure(MismatchError("rank 0 is here, rank 1 there"))


def test_consequence_of_a_mismatch_is_raised_as_the_mismatch() -> None:
    failures = failures_of_a_round(is_broken=True)
    failures.mismatch = MismatchError("rank 0 is here, rank 1 there")
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    with pytest.raises(MismatchError, match="rank 0 is here") as raised:
        failures.is_failure(closed)
    assert raised.value.__cause__ is closed


def test_place_that_fails_again_and_again_is_given_up() -> None:
    failures = failures_of_a_round(is_broken=False)
    for place in (b"1", b"2"):
        for _ in range(MAX_ATTEMPTS):
            failures.count_attempt(place)
    assert failures.is_failure(RuntimeError("Connection closed by peer"))
    with pytest.raises(WorldError, match=f"{MAX_ATTEMPTS} times in a row at 2; giving up. .*Connection closed by peer"):
        failures.count_attempt(b"2")
