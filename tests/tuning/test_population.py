"""Jobs on the same hardware improve the predictions for a new one, as far as they agree."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_dlrover.cli.main import main
from lightning_dlrover.lab.evaluate import evaluate
from lightning_dlrover.lab.simulate.traces import read_trace
from lightning_dlrover.tuning import Columns, Population, StepTimeModel, configuration_of, population_of, prior
from lightning_dlrover.tuning.population import MAX_CONFIGURATIONS, JobResidualGP, ResidualGP, Residuals, variances_of
from lightning_dlrover.tuning.prior import EXPOSED, PhysicalPrior
from lightning_dlrover.tuning.samples import Floats, StepProfile, measurements
from tests.support.windows import TRACES, needs_traces, window, written

NAMES = ("ncf", "cifar10", "deepspeech2", "bert", "imagenet", "yolov3")


def job(size: float, pair: float, seed: int, noise: float = 0.03, dense_bytes: int = 0) -> list[StepProfile]:
    """Windows of a job on hardware whose pairs of nodes share one path, so that each doubling of workers costs more there."""
    rng = np.random.default_rng(seed)
    windows = []
    for workers in (1, 2, 3, 4, 6, 8, 12, 16):
        for nodes in {-(-workers // 4), min(workers, 4)}:
            for batch in (8, 16, 32, 64):
                sync_s = size * ((nodes > 1) + 0.5 * np.log2(workers) + (pair - 1) / 2 * np.log2(workers) * (nodes == 2))
                step_s = (0.02 + 0.002 * batch + sync_s) * rng.lognormal(0, noise)
                windows.append(window(workers, step_s, global_batch=workers * batch, num_nodes=nodes, dense_bytes=dense_bytes))
    return windows


def mean_error(known: Sequence[StepProfile], asked: Sequence[StepProfile], population: Population | None) -> float:
    predicted = StepTimeModel.fit(known, population=population).predict_columns(
        Columns.of([configuration_of(w) for w in asked])
    )
    return float(np.abs(predicted.step_time_s / np.array([w.step_time_s for w in asked]) - 1).mean())


def errors(pairs: Sequence[float]) -> tuple[float, float]:
    """Return the errors for a job on hardware with slow pairs, without and with other jobs, over a few seeds."""
    others = population_of(
        [job(size, pair, seed) for seed, (size, pair) in enumerate(zip((0.02, 0.05, 0.2), pairs, strict=True))]
    )
    alone, helped = [], []
    for seed in range(4):
        mixed = job(0.1, 3.0, 10 + seed)
        random.Random(seed).shuffle(mixed)
        alone.append(mean_error(mixed[:8], mixed[8:], None))
        helped.append(mean_error(mixed[:8], mixed[8:], others))
    return float(np.mean(alone)), float(np.mean(helped))


def test_jobs_on_the_same_hardware_improve_a_prediction_from_few_samples() -> None:
    alone, helped = errors((3.0, 3.0, 3.0))
    assert helped < 0.95 * alone


def test_jobs_that_disagree_are_trusted_less_and_do_little_harm() -> None:
    alone, helped = errors((1.0, 3.0, 8.0))
    assert helped < alone + 0.02


def test_bytes_known_for_all_jobs_predict_communication_before_it_was_measured() -> None:
    per_byte = 1e-9
    known = [
        job(num_bytes * per_byte, 1.0, seed, dense_bytes=num_bytes) for seed, num_bytes in enumerate((10**7, 5 * 10**7, 10**8))
    ]
    target = job(2e8 * per_byte, 1.0, 9, dense_bytes=2 * 10**8)
    one_worker = [w for w in target if w.num_workers == 1]
    larger = [w for w in target if w.num_nodes > 1]
    alone = mean_error(one_worker, larger, None)
    assert mean_error(one_worker, larger, population_of(known)) < min(0.35, alone)


def test_placements_without_any_sample_are_as_in_other_jobs() -> None:
    others = population_of([job(size, 3.0, seed) for seed, size in enumerate((0.02, 0.05, 0.2))])
    target = job(0.1, 3.0, 9)
    known, pairs = [w for w in target if w.num_nodes != 2], [w for w in target if w.num_nodes == 2]
    assert mean_error(known[::3], pairs, others) < 0.15 < mean_error(known[::3], pairs, None)


def test_computing_outside_of_the_backward_pass_hides_no_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = []
    for workers in (1, 2, 4, 8, 16):
        for batch in (8, 16, 32, 64, 128):
            compute_s, sync_s = 0.01 + 0.001 * batch, 0.02 * np.log2(workers) + 0.05 * (workers > 4)
            step_s = compute_s / 3 + max(2 * compute_s / 3, sync_s)
            windows.append(
                window(
                    workers,
                    step_s,
                    global_batch=workers * batch,
                    num_nodes=-(-workers // 4),
                    communication_s=step_s - compute_s,
                )
            )
    columns, measured = measurements(windows)
    errors = []
    for exposed in (0.0, EXPOSED):
        monkeypatch.setattr(prior, "EXPOSED", exposed)
        predicted_s = PhysicalPrior.fit(columns, measured).step_time_s(columns)
        errors.append(np.abs(predicted_s / measured.step_s - 1).mean())
    assert errors[1] < 0.85 * errors[0]


def test_too_few_configurations_give_no_population() -> None:
    assert population_of([]) is None
    assert population_of([[window(1, 0.1), window(2, 0.06)]]) is None


def test_jobs_of_one_worker_say_nothing_of_communication_and_are_harmless() -> None:
    alone = [w for w in job(0.1, 1.0, 0) if w.num_workers == 1]
    several = [window(1, 0.02 + 0.002 * batch, global_batch=batch, dense_bytes=0) for batch in range(8, 80, 8)]
    population = population_of([several, several])
    assert population is not None
    assert mean_error(alone, several, population) < 0.15


def test_fit_from_a_fit_to_nearly_the_same_measurements_ends_at_the_same_prior() -> None:
    population = population_of([job(size, 3.0, seed) for seed, size in enumerate((0.02, 0.05, 0.2))])
    columns, measured = measurements(job(0.1, 3.0, 9))
    most = np.arange(len(columns)) % 8 > 0
    whole = PhysicalPrior.fit(columns, measured, population=population)
    cold, warm = (
        PhysicalPrior.fit(columns.rows(most), measured.rows(most), like, population).predict(columns).log_s
        for like in (None, whole)
    )
    assert np.abs(warm - cold).max() < 0.01


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_other_models_do_no_harm_on_measured_traces(name: str) -> None:
    traces = {other: read_trace(TRACES / f"{other}-placements.csv").samples for other in NAMES}
    population = population_of([samples for other, samples in traces.items() if other != name])
    alone, helped = [], []
    for seed in range(3):
        mixed = random.Random(seed).sample(traces[name], len(traces[name]))
        alone.append(evaluate(mixed[:12], mixed[12:]).mape)
        helped.append(evaluate(mixed[:12], mixed[12:], population).mape)
    assert np.mean(helped) < np.mean(alone) + 0.5


@needs_traces
@pytest.mark.slow
def test_first_steps_off_a_node_are_within_15_percent_and_their_intervals_with_other_jobs_of_known_bytes() -> None:
    jobs = {
        name: [replace(w, dense_bytes=num_bytes) for w in read_trace(TRACES / f"{name}-placements.csv").samples]
        for name, num_bytes in (("ncf", 6_400_000), ("cifar10", 44_700_000), ("bert", 438_000_000), ("yolov3", 246_500_000))
    }
    found = [
        evaluate(
            [w for w in windows if w.num_nodes == 1],
            [w for w in windows if w.num_nodes > 1],
            population_of([others for other, others in jobs.items() if other != name]),
        )
        for name, windows in jobs.items()
    ]
    assert np.mean([each.mape for each in found]) < 15
    assert 80 <= np.mean([each.coverage for each in found]) <= 99


# --- the command ---


def placements(scale: float, sizes: Sequence[str] = ("1", "2", "4", "11", "22", "44", "111", "444")) -> str:
    lines = [f"{place},{b},{scale * (0.01 + 0.001 * b + 0.02 * len(place))}" for place in sizes for b in (8, 16, 32)]
    return "\n".join(["placement,local_bsz,step_time", *lines, ""])


def test_command_reads_one_file_for_each_other_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, test = written(tmp_path, placements(1.0, ("1", "2", "11")), "a.csv"), written(tmp_path, placements(1.0), "b.csv")
    others = [str(written(tmp_path, placements(scale), f"{scale}.csv")) for scale in (0.5, 2.0, 3.0)]
    arguments = ["lab", "evaluate", "--train", str(train), "--test", str(test)]
    assert main(arguments) == 0
    without = capsys.readouterr().out.splitlines()
    assert main([*arguments, "--history", *others[:2], "--history", others[2]]) == 0
    helped = capsys.readouterr().out.splitlines()
    assert helped[-2] == "3 other jobs with 72 samples"
    assert float(helped[-1].split()[0].removeprefix("mape=")) < float(without[-1].split()[0].removeprefix("mape="))


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "bad.csv has no rows"),
        ("placement,step_time\n1,0.1\n", "bad.csv:2 has no local_batch"),
        ("placement,local_bsz,step_time\n1,8,0.1\n1,8,garbage\n", "bad.csv:3: step_time='garbage' is not a number"),
        ("\x00\x01 no table", "bad.csv"),
    ],
)
def test_command_names_the_fault_of_a_file_of_the_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    good, bad = written(tmp_path, placements(1.0), "a.csv"), written(tmp_path, text, "bad.csv")
    assert main(["lab", "evaluate", "--train", str(good), "--test", str(good), "--history", str(good), str(bad)]) == 2
    assert said in capsys.readouterr().err


# --- errors that carry over --------------------------------------------------------------------------------------------------


NONE = 1e-8
BATCH_ERRORS = ResidualGP(np.array([0.1**2, NONE, NONE, NONE, NONE, NONE, NONE, 0.02**2, 0.02**2]))
PLACE_ERRORS = ResidualGP(np.array([NONE, NONE, NONE, NONE, 0.1**2, NONE, NONE, 0.02**2, 0.02**2]))


def columns(places: list[tuple[int, int, int]]) -> Columns:
    """Return configurations of workers, nodes and local batch."""
    windows = [window(workers, 0.1, global_batch=batch * workers, num_nodes=nodes) for workers, nodes, batch in places]
    return Columns.of([configuration_of(w) for w in windows])


def residuals(of: Columns, step: Floats, compute: Floats, by_sync: float = 0.5) -> Residuals:
    halves = np.full(len(of), by_sync)
    return Residuals(of, 1 - halves, halves, step, compute, np.ones(len(of)))


def expected(own: JobResidualGP, asked: Columns) -> Floats:
    halves = np.full(len(asked), 0.5)
    return own.at(asked, halves, halves)


def test_a_batch_with_slow_computing_is_slow_in_every_placement() -> None:
    seen = columns([(2, 1, 16), (2, 1, 32), (4, 1, 16)])
    compute = np.array([0.2, 0.0, 0.2])
    own = JobResidualGP.of(BATCH_ERRORS, residuals(seen, compute / 2, compute))
    slow, normal = expected(own, columns([(16, 4, 16), (16, 4, 32)]))
    assert slow == pytest.approx(0.1, rel=0.1)
    assert abs(normal) < 0.01


def test_computing_that_was_not_measured_shows_in_the_step() -> None:
    seen = columns([(2, 1, 16), (2, 1, 32), (4, 1, 16)])
    own = JobResidualGP.of(BATCH_ERRORS, residuals(seen, np.array([0.1, 0.0, 0.1]), np.full(3, np.nan)))
    slow, normal = expected(own, columns([(16, 4, 16), (16, 4, 32)]))
    assert slow == pytest.approx(0.1, rel=0.2)
    assert abs(normal) < 0.01


def test_errors_of_a_place_fade_with_the_distance_and_with_the_share_of_communication() -> None:
    own = JobResidualGP.of(PLACE_ERRORS, residuals(columns([(4, 2, 32)]), np.array([0.1]), np.zeros(1)))
    here, near, far = expected(own, columns([(4, 2, 32), (5, 2, 32), (64, 16, 32)]))
    assert here > near > 5 * far > 0
    quiet = own.at(columns([(4, 2, 32)]), np.ones(1), np.zeros(1))
    assert abs(quiet[0]) < 1e-4 * here


def test_errors_do_not_carry_over_to_other_numbers_of_threads() -> None:
    own = JobResidualGP.of(BATCH_ERRORS, residuals(columns([(2, 1, 16)]), np.array([0.1]), np.array([0.2])))
    same = columns([(4, 1, 16)])
    other = dataclasses.replace(same, threads=8 * same.threads)
    assert expected(own, other)[0] < 0.2 * expected(own, same)[0]


def test_many_configurations_leave_the_newest_of_the_job() -> None:
    own_places = [(2, 1, batch) for batch in range(1, 501)]
    earlier_places = [(3, 1, batch) for batch in range(1, 101)]
    seen = residuals(columns(own_places + earlier_places), np.zeros(600), np.zeros(600))
    weighted = dataclasses.replace(seen, weight=np.repeat([1.0, 0.3], [500, 100]))
    kept = JobResidualGP.of(BATCH_ERRORS, weighted).columns
    assert sorted(kept.local_batch) == [*range(501 - MAX_CONFIGURATIONS, 501)]
    assert set(kept.num_workers) == {2.0}


def test_variances_of_several_jobs_show_which_errors_carry_over() -> None:
    places = columns([(workers, 1 + workers // 5, batch) for workers in (1, 2, 4, 8, 16) for batch in range(8, 80, 8)])
    jobs = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        of_batch = dict(zip(range(8, 80, 8), rng.normal(0, 0.1, 9), strict=True))
        compute = np.array([of_batch[int(batch)] for batch in places.local_batch])
        noisy = compute + rng.normal(0, 0.02, len(places))
        jobs.append(residuals(places, compute / 2 + rng.normal(0, 0.02, len(places)), noisy))
    same_batch, *_, of_step, of_compute = np.sqrt(variances_of(jobs))
    assert same_batch == pytest.approx(0.1, rel=0.4)
    assert of_step == pytest.approx(0.02, rel=0.4)
    assert of_compute == pytest.approx(0.02, rel=0.4)
