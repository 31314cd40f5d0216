"""`python -m lightning_dlrover.cli`: the `dlrover` command where its script is not on the path."""

import sys

from lightning_dlrover.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
