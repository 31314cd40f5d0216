"""The plug-in of screens for the command line. Imports nothing slow."""

from __future__ import annotations

import argparse
import os

from lightning_dlrover.cli.errors import UsageError
from lightning_dlrover.cli.options import add_place_options
from lightning_dlrover.output import has_terminal


class TopCommand:
    """`dlrover top`."""

    summary = "watch and steer jobs on a full screen: rates, workers, rounds, memory, plans, stacks"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.description = (
            "Watch one job, or all jobs of an etcd or of a folder of run folders, on a full screen that updates itself. Keys "
            "change a job's size and workers after a confirmation that shows the prediction. Needs the extra `top`."
        )
        parser.add_argument("job", metavar="JOB", nargs="?", help="the job's --rdzv-id (default: a list of all jobs)")
        parser.add_argument("--pool", default="default", metavar="POOL", help="pool of the predictions (default default)")
        parser.add_argument("--read-only", action="store_true", help="change nothing: keys that act on a job are off")
        add_place_options(parser)

    def run(self, options: argparse.Namespace) -> int:
        if not has_terminal():
            raise UsageError("dlrover top draws on a terminal, and there is none; `dlrover status --json` prints the same once")
        os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")  # each frame would be sent over ssh
        try:
            from lightning_dlrover.cli.lookup import etcd_access
            from lightning_dlrover.dashboard.top import run_top
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("textual", "rich"):
                raise
            raise UsageError("dlrover top needs the package `textual`: pip install 'lightning-dlrover[top]'") from error
        return run_top(
            *(options.job, options.endpoint, options.key_prefix, options.run_dir, etcd_access(options)),
            pool=options.pool,
            read_only=options.read_only,
        )


TOP = TopCommand()
