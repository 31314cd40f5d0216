"""Memory that operations of torch on the CPU take inside, which shape propagation does not see.

Measured on torch 2.13 with oneDNN: the growth of the process over one operation, without its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["hidden_chunks", "saved_bytes"]

aten = torch.ops.aten

# An LSTM layer's gates and cell states, which oneDNN keeps for backward, in units of the layer's output. Backward uses about
# twice as much beside them: gradients of gates and states.
LSTM_SAVED, LSTM_BACKWARD = 5, 10


def hidden_chunks(func: Any, args: Sequence[Any], result: Any) -> list[list[int]]:
    """Return bytes of allocations inside an operation, in groups; each group is freed before the next one."""
    if func is aten.convolution.default:
        return [[max(_num_bytes(args[0]), _num_bytes(result))]]
    if func is aten.convolution_backward.default:
        after, before, weight, stride = _num_bytes(args[0]), _num_bytes(args[1]), args[2], args[4]
        # oneDNN copies both operands to its blocked layout, once for each gradient, and its result back.
        is_copied_back = any(step > 1 for step in stride) or weight.shape[2:].numel() == 1
        return [[after, before, *([before] if is_copied_back else [])], [before, after]]
    if func is aten.mkldnn_rnn_layer_backward.default:
        return [[LSTM_BACKWARD * _num_bytes(args[7])]]
    return []


def saved_bytes(func: Any, result: Any) -> int:
    """Return the bytes that an operation keeps for its backward pass, beside its results."""
    return LSTM_SAVED * _num_bytes(result[0]) if func is aten.mkldnn_rnn_layer.default else 0


def _num_bytes(tensor: Any) -> int:
    return tensor.nbytes if isinstance(tensor, Tensor) else 0
