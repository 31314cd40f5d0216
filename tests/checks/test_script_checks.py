"""Scripts that several workers cannot execute together are refused with an explanation."""

from __future__ import annotations

from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, RichProgressBar, Timer
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from lightning_dlrover.checks import (
    BackwardCheck,
    UnsupportedScriptError,
    check_capture,
    check_graphs,
    check_hook_state,
    check_precision_of_tables,
    different_callbacks,
    different_rates,
    explain_single_sample,
    monitoring,
    rates,
    rates_digest,
)


def optimizer(rate: float = 0.1, betas: tuple[float, float] = (0.9, 0.99)) -> torch.optim.Adam:
    return torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=rate, betas=betas)


def test_only_callbacks_that_act_together_are_compared() -> None:
    alone = [RichProgressBar(), Timer(), LearningRateMonitor()]
    assert monitoring(alone) == []
    assert monitoring([ModelCheckpoint(), EarlyStopping("loss")]) == ["EarlyStopping(monitor='loss')", "ModelCheckpoint"]


def test_callback_of_one_worker_is_named() -> None:
    common, best = ["ModelCheckpoint"], "ModelCheckpoint(monitor='loss')"
    assert different_callbacks(common, common, "rank 0", "rank 1") == ""
    text = different_callbacks([*common, best], common, "rank 0", "rank 1")
    assert f"{best} on rank 0 only." in text
    assert f"{best} on rank 1 only." in different_callbacks(common, [*common, best], "rank 0", "rank 1")


def test_equal_rates_are_fine() -> None:
    assert rates_digest([optimizer()]) == rates_digest([optimizer()]) < 2**56
    assert different_rates([rates([optimizer()])] * 2, rank=1) is None


@pytest.mark.parametrize("other", [optimizer(0.2), optimizer(betas=(0.8, 0.99))])
def test_worker_with_other_rates_is_the_one_refused(other: torch.optim.Adam) -> None:
    of_ranks = [rates([optimizer()]), rates([other])]
    assert rates_digest([optimizer()]) != rates_digest([other])
    assert different_rates(of_ranks, rank=0) is None
    assert "rank 0's is [0.1" in str(different_rates(of_ranks, rank=1))


def test_step_without_gradients_needs_no_backward() -> None:
    BackwardCheck().optimizer_step(optimizer(), do_nothing_closure)


def test_step_after_manual_backward_is_fine() -> None:
    check, stepped = BackwardCheck(), optimizer()
    stepped.param_groups[0]["params"][0].grad = torch.ones(1)
    check.backward()
    check.optimizer_step(stepped, do_nothing_closure)
    check.batch_begins()
    check.optimizer_step(stepped, do_nothing_closure)  # uses the previous batch's gradients
    check.optimizer_step(stepped, lambda: None)  # may call `manual_backward`
    check.batch_begins()
    with pytest.raises(Exception, match=r"call self\.manual_backward"):
        check.optimizer_step(stepped, do_nothing_closure)


def test_other_errors_of_values_are_left_alone() -> None:
    explain_single_sample(ValueError("a mistake of the user's"), num_samples=1, num_workers=2)
    single = ValueError("Expected more than 1 value per channel when training, got input size [1, 16]")
    explain_single_sample(single, num_samples=1, num_workers=1)
    with pytest.raises(ValueError, match="3 workers share each global batch"):
        explain_single_sample(single, num_samples=1, num_workers=3)


def test_hook_with_a_state_is_refused() -> None:
    check_hook_state(None)
    with pytest.raises(UnsupportedScriptError, match=r"ddp_comm_state=PowerSGDState .* Use a hook without a state"):
        check_hook_state(PowerSGDState(process_group=None))


def test_tables_need_a_precision_without_scaled_gradients() -> None:
    for precision in (SimpleNamespace(), MixedPrecision("bf16-mixed", "cpu")):
        check_precision_of_tables(precision)
    with pytest.raises(UnsupportedScriptError, match=r"precision='16-mixed' scales the loss.*use precision='bf16-mixed'"):
        check_precision_of_tables(MixedPrecision("16-mixed", "cpu"))


def a_code(code: CodeType, name: str) -> CodeType | None:
    """Return a function's code by its name, from inside the code of another one."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return next((found for each in inner if (found := each if each.co_name == name else a_code(each, name))), None)


def test_module_with_torchs_graphed_forward_is_refused() -> None:
    """Without a GPU there is no graph, but the function that torch puts into the module can be made."""
    code = a_code(torch.cuda.make_graphed_callables.__code__, "new_fwd")
    assert code is not None
    model: Any = nn.Sequential(nn.Linear(1, 1))
    check_graphs(model)
    model[0].forward = FunctionType(code, vars(torch.cuda.graphs), closure=tuple(CellType() for _ in code.co_freevars))
    with pytest.raises(UnsupportedScriptError, match=r"module '0' comes from torch\.cuda\.make_graphed_callables"):
        check_graphs(model)


@pytest.mark.gpu
def test_module_with_graphs_of_its_passes_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).cuda()
    torch.cuda.make_graphed_callables(model[0], (torch.randn(4, 8, device="cuda"),))
    with pytest.raises(UnsupportedScriptError, match="make_graphed_callables"):
        check_graphs(model)


@pytest.mark.gpu
def test_capture_of_a_backward_pass_is_refused() -> None:
    torch.zeros(1, device="cuda")
    check_capture()
    with pytest.raises(UnsupportedScriptError, match="captured into a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        check_capture()
