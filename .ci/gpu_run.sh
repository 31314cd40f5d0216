#!/usr/bin/env bash
# Run the parts of this bundle with the Python of this machine, which needs torch, pip and no network. docs/guide/gpu.md describes them.
#   bash run.sh [--device cuda|cpu] [--minutes 8] [--parts NAME...]
cd "$(dirname "${BASH_SOURCE[0]}")" && PYTHONUNBUFFERED=1 exec "${PYTHON:-python3}" parts.py "$@"
