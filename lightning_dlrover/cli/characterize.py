"""`dlrover lab characterize`: where a DLRM's training time goes on this machine."""

from __future__ import annotations

import argparse
import threading
import time

from lightning_dlrover.characterize.compare import compare_text
from lightning_dlrover.characterize.compare_page import write_comparison
from lightning_dlrover.characterize.export import write_tables
from lightning_dlrover.characterize.findings import Evidence, findings
from lightning_dlrover.characterize.history import record_in_history
from lightning_dlrover.characterize.machine import Machine, has, this_machine, usable_memory_bytes, whole_cores
from lightning_dlrover.characterize.page import write_page
from lightning_dlrover.characterize.results import limit_values, results_of
from lightning_dlrover.characterize.run import BUDGETS_S, measure_studies
from lightning_dlrover.characterize.store import Store, read_store
from lightning_dlrover.characterize.studies import STUDIES, Scope, Study, all_studies
from lightning_dlrover.characterize.users_model import check_users_model
from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.cli.signals import Interrupted, signals_as_exceptions
from lightning_dlrover.learn.history import HistoryError, JobHistory, history_url
from lightning_dlrover.output import complain, counted, show

MIN_BUDGET_S, MAX_BUDGET_S = 10.0, 7 * 24 * 3600.0
COMPARISON = "comparison.html"


def characterize_command(options: argparse.Namespace) -> int:
    """Measure, write the report, and record the samples; or compare two folders."""
    if options.compare:
        one, other = (read_store(folder) for folder in options.compare)
        show(compare_text(one, other))
        write_comparison(options.out / COMPARISON, one, other)
        show(f"report: {options.out / COMPARISON}")
        return EXIT_OK
    names = options.study or list(STUDIES)
    if unknown := sorted({*names} - {*STUDIES}):
        raise UsageError(f"--study {' '.join(unknown)}: unknown; the studies are {', '.join(STUDIES)}")
    budget_s = BUDGETS_S[options.size] if options.budget is None else 60 * options.budget
    if not MIN_BUDGET_S <= budget_s <= MAX_BUDGET_S:
        raise UsageError(
            f"--budget {options.budget:g}: give between {MIN_BUDGET_S / 60:.2g} and {MAX_BUDGET_S / 60:.0f} minutes"
        )
    if options.model:
        check_users_model(options.model)
    machine = this_machine(options.device)
    scope = Scope(
        size=options.size,
        device=options.device,
        cores=whole_cores(),
        memory_bytes=usable_memory_bytes(),
        has_torchrec=has("torchrec") and has("fbgemm_gpu"),
        has_pyarrow=has("pyarrow"),
        users_model=options.model or "",
    )
    studies = all_studies(scope, names)
    began = time.monotonic()
    exit_code = EXIT_OK
    with Store(options.out, machine) as store:
        try:
            with signals_as_exceptions(threading.Event()):
                measure_studies(store, studies, scope, budget_s)
        except Interrupted as interrupted:
            exit_code = 128 + interrupted.signal_number
            complain(
                f"interrupted; the same command continues with {counted(len(store.found.visits), 'measurement')} in "
                f"{store.path}"
            )
        _write(options, store, studies, scope, machine, time.monotonic() - began)
    return exit_code


def _write(
    options: argparse.Namespace, store: Store, studies: list[Study], scope: Scope, machine: Machine, took_s: float
) -> None:
    """Write tables and report, record the samples, and show the findings."""
    results, limits = results_of(store.found.visits), limit_values(store.found.limits)
    if not results:
        return
    found = findings(Evidence(studies, results, limits, scope.cores))
    write_tables(options.out, studies, results)
    report = options.out / "report.html"
    write_page(report, store.found, studies, found, scope)
    for finding in found:
        show(f"- {finding.text}")
    for study in studies:
        for text in study.skipped:
            show(f"skipped in {study.name}: {text}")
    try:
        if (url := history_url(options.history)) is not None:
            with JobHistory(url) as history:
                count = record_in_history(history, machine, store.found.visits)
            show(f"history: {counted(count, 'reference model')} recorded, from which later jobs start")
    except HistoryError as error:  # the measurements are safe, and the history is a convenience
        complain(str(error))
    num_points = len({point for study in studies for point in study.points} & results.keys())
    num_asked = len({point for study in studies for point in study.points})
    if num_points < num_asked:
        show(f"{num_asked - num_points} of {counted(num_asked, 'point')} not measured; the same command continues")
    show(f"{counted(num_points, 'point')} in {took_s / 60:.1f} min; report: {report}")
