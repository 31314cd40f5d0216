"""Slurm's commands under a test's control: they answer, refuse, fail, hang or return garbage."""

from __future__ import annotations

from pathlib import Path

_SUBMIT = """\
n=$(($(cat FOLDER/jobs | wc -l) + 1))
for argument; do case $argument in --job-name=*) echo "$n PENDING ${argument#*=}" >> FOLDER/jobs ;; esac; done
echo $n"""
_CANCEL = """\
name='[^ ]*'
for argument; do case $argument in
--jobname=*) name=${argument#*=} ;;
--) ;;
*) sed -i -E "s/^$argument (PENDING|RUNNING) ($name)$/$argument CANCELLED \\2/" FOLDER/jobs ;;
esac; done"""


class SlurmCommands:
    """Executables named like Slurm's in `folder`, each a few lines of shell. `calls` lists their arguments.

    They keep no jobs unless `keep_jobs` is called: then `sbatch`, `squeue` and `scancel` share a list of jobs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "calls"
        self.log.touch()
        for name in ("sbatch", "squeue", "scancel", "scontrol"):
            self.set(name, "exit 0")
        self.set("sbatch", "echo 17")
        self.set("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")

    def set(self, name: str, shell: str, is_executed: bool = False) -> None:
        """Replace a command. `is_executed`: it first acts as under `keep_jobs`, without its output."""
        if is_executed:
            shell = f"{{ {self._shells[name]}; }} > /dev/null\n{shell}"
        new = self.folder / f".{name}"
        new.write_text(f'#!/bin/bash\necho {name} "$@" >> {self.log}\n{shell}\n')
        new.chmod(0o755)
        new.replace(self.folder / name)  # a running command keeps its old version

    def queue(self, *lines: str) -> None:
        text = "".join(f"{line}\n" for line in lines)
        self.set("squeue", f"cat <<'END'\n{text}END")

    def keep_jobs(self) -> None:
        """Let the commands submit, list and cancel jobs. Jobs run and end by `set_state` alone."""
        self._jobs.touch()
        for name, shell in self._shells.items():
            self.set(name, shell)

    def set_state(self, node: str, state: str) -> None:
        """Change the state of a node's job; an empty one removes the job."""
        rows = [line.split() for line in self._jobs.read_text().splitlines()]
        rows = [[n, state if f".{node}." in name else old, name] for n, old, name in rows]
        self._jobs.write_text("".join(f"{' '.join(row)}\n" for row in rows if row[1]))

    def calls(self, name: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.split()[0] == name]

    @property
    def _shells(self) -> dict[str, str]:
        return {
            "sbatch": _SUBMIT.replace("FOLDER", str(self.folder)),
            "squeue": f"cat {self._jobs}",
            "scancel": _CANCEL.replace("FOLDER", str(self.folder)),
        }

    @property
    def _jobs(self) -> Path:
        return self.folder / "jobs"
