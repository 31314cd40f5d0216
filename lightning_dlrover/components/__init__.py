"""Start, control and end the nodes of a job, for `dlrover run` and for TorchX."""

from __future__ import annotations

import signal

# Conventions between the processes that start a node: the form of arguments, and the signal to leave.

ESCAPED = "--escaped"
"""First argument of `dlrover run` if all others are percent-encoded, which keeps schedulers from expanding parts of them."""

LEAVE_SIGNAL = signal.SIGUSR1
"""Makes several agents' parent let all workers hand over and leave."""
