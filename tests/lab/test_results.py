from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from lightning_dlrover.lab.characterize.findings import Evidence, findings
from lightning_dlrover.lab.characterize.measure import EnergyMeter
from lightning_dlrover.lab.characterize.page import compare_text, write_comparison, write_page
from lightning_dlrover.lab.characterize.points import (
    WORKLOADS,
    Limit,
    Machine,
    Point,
    Study,
    Visit,
    all_studies,
    descriptor,
    half_widths,
    sensitivity,
)
from lightning_dlrover.lab.characterize.results import (
    Header,
    Measurements,
    Result,
    agreement,
    record_in_history,
    results_of,
    write_tables,
)
from lightning_dlrover.tuning.candidates import nearest, suggest
from lightning_dlrover.tuning.history import JobHistory
from lightning_dlrover.tuning.plan import Limits, Settings
from lightning_dlrover.tuning.samples import STEP_PARTS, impossible_figure
from tests.support.characterize_points import SCOPE, visit

POINT = Point("p", batch=100)
MACHINE = Machine("host", "a processor", 2.0, 24, "", "2.13")


def test_range_of_the_blocks_stands_in_until_a_point_has_two_visits() -> None:
    result = results_of([visit(POINT, 1.0, 2.0, 6.0), visit(POINT, problem="failed")])[POINT]
    assert (result.median, result.low, result.high, result.num_visits) == (2.0, 1.0, 6.0, 1)
    assert result.samples_per_s == 50.0


def test_interval_follows_from_the_visits_and_not_from_their_blocks() -> None:
    quiet = results_of([visit(POINT, 1.0, 4.0, 16.0), visit(POINT, 2.0, 4.0, 8.0)])[POINT]
    assert quiet.low == pytest.approx(quiet.median) == pytest.approx(quiet.high) == pytest.approx(4.0)
    drifting = results_of([visit(POINT, 2.0, 2.0), visit(POINT, 8.0, 8.0)])[POINT]
    assert drifting.median == pytest.approx(4.0)
    assert drifting.low < 2.0 < 8.0 < drifting.high


def test_point_with_one_visit_has_the_wider_interval_of_what_other_points_showed() -> None:
    once = replace(POINT, batch=200)
    results = results_of([visit(POINT, 1.0), visit(POINT, 1.2), visit(once, 1.0)])
    assert results[once].spread > results[POINT].spread > 0


def test_runs_agree_where_one_figure_is_within_the_others_interval() -> None:
    def run(*medians: tuple[float, ...]) -> dict[Point, Result]:
        return results_of([visit(replace(POINT, batch=n), m) for n, values in enumerate(medians, 1) for m in values])

    assert agreement(run((1.0, 1.1), (1.0, 1.1)), run((1.15, 1.15), (5.0, 5.1))) == (1, 2)


def sweep(name: str, x: str, points: list[Point], **more: object) -> Study:
    return Study(name, name, x, (), tuple(points))


def evidence(study: Study, visits: list[Visit], **limits: float) -> Evidence:
    return Evidence([study], results_of(visits), {(name, 2): value for name, value in limits.items()}, 2)


def texts(of: Evidence) -> str:
    return "\n".join(finding.text for finding in findings(of))


def test_rules_without_measurements_find_nothing() -> None:
    assert findings(Evidence(all_studies(SCOPE), {}, {}, 2)) == []


@pytest.mark.parametrize(("second", "expected"), [(1.02, ""), (2.0, "no other program runs")])
def test_findings_of_a_busy_machine_begin_with_a_warning(second: float, expected: str) -> None:
    study = sweep("anything", "batch", [POINT])
    found = texts(evidence(study, [visit(POINT, 1.0), visit(POINT, second)]))
    assert (expected in found) if expected else not found


@pytest.mark.parametrize(
    "steps, expected",
    [
        ((0.01, 0.02, 0.04, 0.09), "batch of 32 reaches 95% .* does not|batch of 32 reaches 95% .* appears"),
        ((0.1, 0.1, 0.1, 0.1), "still grows up to the largest batch, 64.0 times from 32; .* does not appear"),
    ],
)
def test_batch_rule_names_the_smallest_batch_that_is_enough(steps: tuple[float, ...], expected: str) -> None:
    points = [replace(POINT, batch=b) for b in (32, 128, 512, 2048)]
    if steps[0] == 0.01:  # throughput falls with the batch
        steps = tuple(b / 1000 * factor for b, factor in zip((32, 128, 512, 2048), (1, 1, 1.1, 1.3), strict=True))
    found = evidence(sweep("batch", "batch", points), [visit(p, s) for p, s in zip(points, steps, strict=True)])
    assert re.search(expected, texts(found))


@pytest.mark.parametrize("factor, expected", [(3.0, "leave the caches"), (1.05, "take the same time")])
def test_rows_rule_finds_the_caches_only_where_steps_jump(factor: float, expected: str) -> None:
    points = [replace(POINT, rows=rows) for rows in (1000, 10_000, 100_000)]
    steps = (1.0, 1.02, 1.02 * factor)
    found = evidence(sweep("rows", "rows", points), [visit(p, s) for p, s in zip(points, steps, strict=True)])
    assert expected in texts(found)


def test_steps_that_jump_within_their_intervals_show_no_caches() -> None:
    small, large = (replace(POINT, rows=rows) for rows in (1000, 10_000))
    noisy = [visit(small, 1.0), visit(small, 3.0), visit(large, 3.0), visit(large, 9.0)]
    found = texts(evidence(sweep("rows", "rows", [small, large]), noisy))
    assert "does not show where the tables leave the caches" in found
    assert "there the tables leave" not in found


def test_loader_rule_compares_with_no_loader_workers_or_finds_nothing() -> None:
    none, one, two = (replace(POINT, data="packed", loader_workers=n) for n in (0, 1, 2))
    study = sweep("loader", "loader_workers", [none, one, two])
    assert texts(evidence(study, [visit(none, 1.0)])) == ""
    assert texts(evidence(study, [visit(one, 1.0), visit(two, 1.0)])) == ""
    assert "without loader workers" in texts(evidence(study, [visit(none, 1.0), visit(two, 1.0)]))


def test_long_parts_are_written_in_whole_milliseconds() -> None:
    study = sweep("devices", "workload", [WORKLOADS["compute"]])
    assert "of 1,234 ms" in texts(evidence(study, [visit(WORKLOADS["compute"], 1.2341)]))


@pytest.mark.parametrize("limit, expected", [(0.001, "bandwidth-bound"), (1000.0, "bound by instructions")])
def test_tables_are_bandwidth_bound_only_close_to_the_limit(limit: float, expected: str) -> None:
    study = sweep("devices", "workload", [WORKLOADS["memory"]])
    visits = [visit(WORKLOADS["memory"], 0.1)] * 2
    assert expected in texts(evidence(study, visits, rows=limit))
    assert expected not in texts(evidence(study, visits[:1], rows=limit)), "one visit cannot tell"


def test_models_are_compared_with_the_limits_of_the_device_on_which_they_ran() -> None:
    on_cpu = WORKLOADS["memory"]
    points = [replace(on_cpu, device="cpu"), replace(on_cpu, device="cuda"), replace(on_cpu, device="mix")]
    study = sweep("devices", "workload", points)
    found = texts(evidence(study, [visit(point, 0.1) for point in points] * 2, rows=0.001, gpu_rows=1000.0))
    assert re.search(r"On the CPU, tables of the memory model .* 0.001 GB/s .* bandwidth-bound", found)
    assert re.search(r"On the GPU, tables of the memory model .* 1e\+03 GB/s .* bound by instructions", found)
    assert found.count("tables of the memory model") == 2
    assert "bandwidth-bound" not in texts(evidence(study, [visit(points[1], 0.1)] * 2, rows=0.001))


@pytest.mark.parametrize(("device", "share"), [("cpu", "50%"), ("cuda", "5%")])
def test_mlps_are_compared_with_the_multiply_of_their_device(device: Literal["cpu", "cuda"], share: str) -> None:
    points = [replace(WORKLOADS["compute"], device=device, width=width) for width in (64, 256)]
    study = sweep("mlp", "width", points)
    visits = [visit(point, 0.1) for point in points]
    flops = results_of(visits)[points[1]].mlp_flops_per_s
    assert flops is not None
    found = texts(evidence(study, visits, multiply=flops / 5e8, multiply_torch=flops / 5e8, gpu_multiply=flops / 5e7))
    assert f"GFLOP/s, {share} of torch's matrix multiply" in found


def test_batches_on_a_gpu_are_not_compared_with_a_study_of_cpus() -> None:
    points = [replace(POINT, batch=b, device="cuda") for b in (32, 128)]
    found = texts(evidence(sweep("batch", "batch", points), [visit(p, 0.1) for p in points]))
    assert "fixed cost is about" in found
    assert "CPU" not in found


def test_slower_torch_multiply_is_found_and_an_equal_one_is_not() -> None:
    study = sweep("mlp", "width", [])
    assert "gain up to 50%" in texts(evidence(study, [], multiply=150.0, multiply_torch=100.0))
    assert texts(evidence(study, [], multiply=100.0, multiply_torch=99.0)) == ""


def all_measured() -> tuple[list[Study], Measurements]:
    """Give every point of a quick run times that grow with its work."""
    studies = all_studies(SCOPE)
    points = dict.fromkeys(point for study in studies for point in study.points)
    visits = []
    for number, point in enumerate(points):
        faster = 1.0 + 0.8 * (point.num_workers == 2) + 0.3 * (point.loader_workers == 1)
        base = 0.75 if point.measures_loss else 0.01 / faster
        visits.append(visit(point, base, base * 1.02, at=1000.0 + number))
    limits = [Limit(name, "GB/s", 2, 1.0, 1.0, (10.0, 11.0)) for name in ("copy", "rows", "multiply", "multiply_torch")]
    return studies, Measurements(Header(1, "0", MACHINE), visits, limits)


def test_report_holds_every_study_and_escapes_text(tmp_path: Path) -> None:
    studies, measured = all_measured()
    measured = Measurements(Header(1, "0", replace(MACHINE, processor="<b>chip</b>")), measured.visits[:-1], measured.limits)
    results = results_of(measured.visits)
    found = findings(Evidence(studies, results, {("rows", 2): 10.0}, 2))
    write_page(tmp_path / "report.html", measured, studies, found, SCOPE)
    page = (tmp_path / "report.html").read_text()
    for study in studies:
        assert study.title in page
    assert page.count("<svg") == len(studies) + 2  # and the loss, and the roofline
    assert "<b>chip" not in page
    assert all(finding.text.split(";")[0][:30] in page for finding in found[:3])
    assert "not measured" in page  # energy


def test_a_single_point_is_a_row_of_an_open_table_and_no_plot(tmp_path: Path) -> None:
    studies, measured = all_measured()
    single = Measurements(measured.header, measured.visits[:1], measured.limits)
    write_page(tmp_path / "report.html", single, studies, [], SCOPE)
    page = (tmp_path / "report.html").read_text()
    assert "<svg" not in page
    assert page.count("<details open>") == page.count("Table: 1 point,") >= 1
    assert "1 visit<" in page
    assert "from 1 measurement." in page


def test_tables_are_written_with_one_row_per_point(tmp_path: Path) -> None:
    studies, measured = all_measured()
    files = write_tables(tmp_path, studies, results_of(measured.visits))
    batch = (tmp_path / "batch.csv").read_text().splitlines()
    assert len(batch) == 1 + len(next(study for study in studies if study.name == "batch").points)
    import pyarrow.parquet as pq

    assert pq.read_table(tmp_path / "batch.parquet").num_rows == len(batch) - 1
    assert len(files) == 2 * len(studies)


def test_comparison_shows_ratios_of_common_points() -> None:
    _, one = all_measured()
    twice = [replace(v, blocks=tuple(b / 2 for b in v.blocks)) if not v.point.measures_loss else v for v in one.visits]
    text = compare_text(one, Measurements(one.header, twice, one.limits))
    assert "B is 2.00 times as fast as A" in text
    nothing = compare_text(one, Measurements(one.header, [], one.limits))
    assert "no point was measured on both" in nothing


def test_comparison_page_shows_the_figures_of_both_machines(tmp_path: Path) -> None:
    studies, one = all_measured()
    other = Measurements(Header(1, "0", replace(MACHINE, name="<i>other</i>")), one.visits[:1], [])
    write_comparison(tmp_path / "new" / "comparison.html", one, other)
    page = (tmp_path / "new" / "comparison.html").read_text()
    assert page.count("<svg") == len(studies) + 1  # the first machine's studies and roofline; the second has a single point
    assert "B has fewer than two measured points here" in page
    assert all(study.title in page for study in studies)
    assert "&lt;i&gt;other" in page
    assert "<i>other" not in page


def test_history_holds_possible_windows_from_which_a_job_starts_at_the_best(tmp_path: Path) -> None:
    _, measured = all_measured()
    with JobHistory(f"sqlite:///{tmp_path}/h.sqlite") as history:
        assert record_in_history(history, MACHINE, measured.visits) == len(WORKLOADS)
        record_in_history(history, MACHINE, measured.visits)  # a second run of the same folder adds nothing
        jobs = history.jobs()
        assert len(jobs) == len(WORKLOADS)
        windows = {job.run_id: history.windows(job.key) for job in jobs}
        for found in windows.values():
            assert all(impossible_figure(window) is None for window in found)
            for window in found:
                assert sum(getattr(window, f"{part}_s") for part in STEP_PARTS) == pytest.approx(window.step_time_s)
        wanted = descriptor(WORKLOADS["compute"], 2.0)
        similar = history.similar(wanted)
        assert similar[0].job.startswith("characterize-compute")
        limits = Limits(1, 3, (0, 1, 2), (1, 2), (2, 4))
        first = windows["characterize-compute"][0]
        suggestion = suggest(first, nearest(wanted, similar), limits, node_cores=2.0, at=2000.0)
        assert suggestion is not None
        assert suggestion.settings == Settings(2, 1, 1, 2)


def test_energy_counter_may_wrap_around_and_may_be_missing(tmp_path: Path) -> None:
    assert EnergyMeter(cuda=False, powercap=tmp_path).joules() is None
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "max_energy_range_uj").write_text("1000000\n")
    (zone / "energy_uj").write_text("900000\n")
    meter = EnergyMeter(cuda=False, powercap=tmp_path)
    (zone / "energy_uj").write_text("400000\n")
    assert meter.joules() == pytest.approx(0.5)


def test_interval_takes_two_visits_of_some_point() -> None:
    assert half_widths([[(0.0, 0.0)], [(1.0, 0.0)]]) is None


@pytest.mark.parametrize("num_visits", [2, 3, 4])
def test_nine_tenths_of_second_runs_lie_within_the_interval(num_visits: int) -> None:
    rng = np.random.default_rng(num_visits)
    deviations = 0.05 * rng.uniform(0.5, 2.0, size=2000)  # points differ in how much they vary
    one, other = (deviations[:, None] * rng.standard_normal((2000, num_visits)) for _ in range(2))
    widths = half_widths([[(value, 0.0) for value in visits] for visits in one.tolist()])
    assert widths is not None
    inside = np.abs(one.mean(axis=1) - other.mean(axis=1)) <= widths
    assert 0.87 <= inside.mean() <= 0.96
    assert np.median(widths) < 6 * 0.05 / np.sqrt(num_visits)


def test_changes_that_the_reference_program_shows_are_no_part_of_the_interval() -> None:
    rng = np.random.default_rng(0)
    speeds = 0.3 * rng.standard_normal((50, 3))
    points = [[(0.5 * x + 0.01 * rng.standard_normal(), x) for x in visits] for visits in speeds.tolist()]
    assert sensitivity(points) == pytest.approx(0.5, abs=0.02)
    widths = half_widths(points)
    unexplained = half_widths([[(y, 0.0) for y, _ in visits] for visits in points])
    assert widths is not None
    assert unexplained is not None
    assert max(widths) < 0.1 < min(unexplained)


def test_noise_of_the_reference_program_on_a_quiet_machine_explains_nothing() -> None:
    assert sensitivity([[(0.0, 0.0), (0.005, 0.005)]]) < 0.05
    assert sensitivity([[(0.0, 0.0)]]) == 0.0
