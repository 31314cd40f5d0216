"""What is known of backends, and the variables with which NCCL would end survivors."""

from __future__ import annotations

import pytest

from lightning_dlrover.rdzv.transport.process_groups import Traits, has_gloo_for_cpu, prepare_environment, traits_of, with_gloo


@pytest.mark.parametrize(
    "given, used",
    [
        ("gloo", "gloo"),
        ("nccl", "cpu:gloo,cuda:nccl"),  # typical of scripts written for stock DDP
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("cuda:nccl,cpu:gloo", "cuda:nccl,cpu:gloo"),
        ("NCCL", "cpu:gloo,cuda:nccl"),  # torch takes capitals, too
        ("cpu:GLOO,cuda:NCCL", "cpu:gloo,cuda:nccl"),
    ],
)
def test_script_of_stock_ddp_keeps_gloo_for_the_cpu(given: str, used: str) -> None:
    assert with_gloo(given) == used
    assert has_gloo_for_cpu(used)


def test_group_behaves_like_all_of_its_backends() -> None:
    assert traits_of("gloo") == Traits(is_asynchronous=False, is_abortable=False)
    assert traits_of("cpu:gloo,cuda:nccl") == Traits(is_asynchronous=True, is_abortable=True)


# --- the environment ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [{}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}])  # torch's agent sets 1 in every worker
def test_watchdog_of_nccl_is_switched_off(found: dict[str, str]) -> None:
    prepare_environment(found)
    assert found == {
        "NCCL_RUNTIME_CONNECT": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }


def test_harmless_choices_of_the_user_stay() -> None:
    found = {"NCCL_RUNTIME_CONNECT": "1", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
    prepare_environment(found)
    assert found["NCCL_RUNTIME_CONNECT"] == "1"
    assert found["TORCH_DISTRIBUTED_DEBUG"] == "INFO"


@pytest.mark.parametrize(
    "name, value",
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("TORCH_NCCL_ENABLE_MONITORING", "true"),
        ("TORCH_NCCL_PROPAGATE_ERROR", "1"),
        ("TORCH_NCCL_DESYNC_DEBUG", "1"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
    ],
)
def test_value_that_would_end_survivors_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}={value} .*: remove {name} from the environment"):
        prepare_environment({name: value})
