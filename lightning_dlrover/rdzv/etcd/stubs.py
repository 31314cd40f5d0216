"""gRPC and the stubs of etcd's services, for all modules of this package that use etcd.

The stubs are those of `pyetcd` (package etcd-sdk-python). Its client class is not used: its transactions do not return a
revision, its failover is not thread-safe and its tokens are never renewed.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

# gRPC reads both variables only while it is imported, and ignores later changes, even before the first channel is made. A
# training process forks its data-loader workers, which never use etcd. gRPC's fork handlers would only print a line for each of
# them, or disturb the watch in the parent.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc  # type: ignore[import-untyped]

__all__ = ["etcdrpc", "grpc"]

# Imported by name, because its type stub (rpc_pb2.pyi of 0.0.7) is not valid Python and would stop mypy for every user.
etcdrpc: Any = importlib.import_module("pyetcd.etcdrpc")
