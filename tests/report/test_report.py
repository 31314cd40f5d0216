from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.patches import Rectangle

from lightning_dlrover.rdzv.job.records import EventRecord
from lightning_dlrover.report.page import plans_picture, step_parts_picture, summary_text, throughput_picture, write_report
from lightning_dlrover.report.timeline import explain_text, outcome_of, timeline_of
from lightning_dlrover.tuning.plan import Candidate, Decision, Settings
from tests.support.windows import window

PACKAGE = Path(__file__).resolve().parents[2] / "lightning_dlrover"

BEGIN = 1_800_000_000.0
HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>&\"$\\frac$"


def round_event(at: float, number: int, num_workers: int, kind: str, reason: str = "because") -> EventRecord:
    members = [f"worker-{i}" for i in range(num_workers)]
    data = {"number": number, "members": members, "kind": kind, "planned": kind != "loss", "reason": reason}
    return EventRecord("round", BEGIN + at, reason, data)


def stall_event(at: float, round_number: int, seconds: float, kind: str) -> EventRecord:
    data = {"round": round_number, "seconds": seconds, "kind": kind, "workers_before": 1, "workers_after": 2}
    return EventRecord("stall", BEGIN + at, "stalled", data)


def profile_event(at: float, round_number: int, num_workers: int, step_time_s: float, first_step: int) -> EventRecord:
    made = window(num_workers, step_time_s, global_batch=1024, num_nodes=num_workers)
    profile = dataclasses.replace(
        made,
        round_number=round_number,
        first_step=first_step,
        num_steps=10,
        data_wait_s=0.05 * step_time_s,
        forward_s=0.3 * step_time_s,
        backward_s=0.4 * step_time_s,
        communication_s=0.1 * step_time_s,
        optimizer_s=0.1 * step_time_s,
        other_s=0.05 * step_time_s,
        at=BEGIN + at,
    )
    return EventRecord("profile", BEGIN + at, "", asdict(profile))


def decision_event(at: float, decision_id: int, reason: str = "2 workers are faster") -> EventRecord:
    one, two = Settings(1, 0, 1, 0), Settings(2, 0, 1, 0)
    decision = Decision(
        decision_id=decision_id,
        at=BEGIN + at,
        current=one,
        chosen=two,
        reason=reason,
        candidates=(
            Candidate(one, 0.13, 0.12, 0.14, 7877.0, 0.0, measured=True, feasible=True, cores=1.0, on_front=True),
            Candidate(two, 0.08, 0.07, 0.10, 12800.0, 30.0, measured=False, feasible=True, cores=2.0, on_front=True),
        ),
        observed_step_time_s=0.13,
        predicted_step_time_s=0.08,
        explored=True,
    )
    return EventRecord("decision", BEGIN + at, reason, decision.to_data())


def whole_job() -> list[EventRecord]:
    """Events of a start, a planned growth, a loss, a replacement, a manual shrink and the end."""
    events = [round_event(0, 1, 1, "start"), stall_event(0.1, 1, 5.0, "start")]
    events += [profile_event(2 + 2 * i, 1, 1, 0.13, 10 * i) for i in range(10)]
    events += [decision_event(20, 1), round_event(22, 2, 2, "grow"), stall_event(22.3, 2, 0.3, "grow")]
    events += [stall_event(22.2, 2, 0.2, "grow")]
    events += [profile_event(24 + 2 * i, 2, 2, 0.1, 100 + 10 * i) for i in range(10)]
    events += [EventRecord("loss", BEGIN + 44, "worker-1 was lost", {"worker_id": "worker-1", "round": 2})]
    events += [EventRecord("loss", BEGIN + 44.05, "worker-1 is gone", {"worker_id": "worker-1", "round": 2})]
    events += [round_event(44.1, 3, 1, "loss"), stall_event(44.3, 3, 0.25, "loss")]
    events += [round_event(50, 4, 2, "grow"), stall_event(50.3, 4, 0.3, "grow")]
    events += [EventRecord("scale", BEGIN + 60, "", {"num_workers": 1, "source": "user"})]
    events += [round_event(60.1, 5, 1, "shrink"), stall_event(60.3, 5, 0.1, "shrink")]
    return [*events, EventRecord("finished", BEGIN + 70, "", {"global_step": 250})]


class Page(HTMLParser):
    """Tags, their attributes and the text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(events: list[EventRecord], tmp_path: Path, run_id: str = "job") -> Page:
    path = tmp_path / "runs" / "report.html"
    write_report(run_id, events, path)
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    return Page(path)


@pytest.fixture(scope="module")
def whole_page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(whole_job(), tmp_path_factory.mktemp("whole"))


def test_report_has_four_pictures_and_a_row_per_round_and_decision(whole_page: Page) -> None:
    assert whole_page.tags.count("svg") == 4
    assert whole_page.tags.count("table") == 3  # rounds, decisions, the others
    assert whole_page.tags.count("tr") == (1 + 5) + (1 + 1) + (1 + 2)
    for word in ("throughput (samples/s)", "step time (ms)", "workers", "communication", "predicted"):
        assert word in whole_page.text
    assert "user asked for 1 worker" in whole_page.text


def test_the_page_needs_nothing_from_elsewhere(whole_page: Page) -> None:
    assert not {"script", "link", "iframe", "img", "object"} & set(whole_page.tags)
    for name, value in whole_page.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value is not None
            assert value.startswith("#")


def test_pictures_take_the_pages_text_colour_and_share_no_ids(whole_page: Page) -> None:
    ids = [value for name, value in whole_page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert any("currentColor" in (value or "") for name, value in whole_page.attributes if name == "style")
    assert not any("#123457" in (value or "") for _, value in whole_page.attributes)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    events = [
        round_event(0, 1, 1, HOSTILE, HOSTILE),
        profile_event(2, 1, 1, 0.1, 0),
        decision_event(3, 1, HOSTILE),
        EventRecord("loss", BEGIN + 4, HOSTILE, {"worker_id": "w"}),
        EventRecord("scale", BEGIN + 4, HOSTILE, {}),
        EventRecord("resume", BEGIN + 4, HOSTILE, {}),
        EventRecord("error", BEGIN + 5, "", {"worker_id": HOSTILE, "traceback": HOSTILE}),
    ]
    page = page_of(events, tmp_path, run_id=HOSTILE)
    assert not {"script", "img"} & set(page.tags)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert page.text.count(HOSTILE) >= 8


def test_the_summary_cannot_steer_a_terminal() -> None:
    events = [round_event(0, 1, 1, "gr\x1b[2J", "a\nb\r\x1b]0;title\x07")]
    text = summary_text("job\x1b[31m", events)
    assert all(c.isprintable() or c == "\n" for c in text)


def test_figures_are_those_of_the_events(whole_page: Page) -> None:
    timeline = timeline_of("job", whole_job())
    assert timeline.num_steps == 250
    assert timeline.num_profiled_samples == 20 * 10 * 1024
    assert (len(timeline.rounds), timeline.num_resizes, timeline.num_losses) == (5, 4, 1)
    # Sum of each round's longest stall; the start does not count.
    assert timeline.total_stall_s == pytest.approx(0.3 + 0.25 + 0.3 + 0.1)
    found = outcome_of(timeline, timeline.decisions[0])
    assert found is not None
    assert found.observed_step_time_s == pytest.approx(0.1)
    assert "950 ms" in whole_page.text
    assert "-20 %" in whole_page.text  # 80 ms predicted, 100 ms measured


def test_the_summary_fits_one_screen_and_keeps_the_newest_rounds() -> None:
    many = [round_event(i, i + 1, 1 + i % 3, "grow", "a long reason " * 20) for i in range(300)]
    for events in (many, many[100:], whole_job(), []):
        lines = summary_text("job", events).splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
    assert "    300 " in summary_text("job", many)


@pytest.mark.parametrize("num_events", range(len(whole_job())))
def test_a_job_cut_short_anywhere_still_has_a_report(num_events: int, tmp_path: Path) -> None:
    assert summary_text("job", whole_job()[:num_events])
    if num_events % 7:  # every prefix gets a summary, each seventh a page, which costs half a second
        return
    page = page_of(whole_job()[:num_events], tmp_path)
    assert ("not reported that it finished" in page.text) == (num_events > 0)


def test_missing_parts_are_reported(tmp_path: Path) -> None:
    assert "No events were recorded" in page_of([], tmp_path).text
    only_round = page_of([round_event(0, 4, 1, "start")], tmp_path)
    assert "The log begins with round 4" in only_round.text
    assert "No step profile was recorded" in only_round.text
    assert "The planner recorded no decision" in only_round.text
    assert "No stall was measured for round 2" in summary_text("job", [round_event(1, 2, 2, "grow")])


def test_broken_events_are_left_out_and_counted(tmp_path: Path) -> None:
    broken = [
        EventRecord("round", BEGIN, "", {"number": 1}),
        EventRecord("round", BEGIN, "", {"number": "one", "members": [], "kind": "start"}),
        EventRecord("profile", BEGIN, "", {"step_time_s": math.nan}),
        dataclasses.replace(profile_event(1, 1, 1, 0.1, 0), data={**profile_event(1, 1, 1, 0.1, 0).data, "forward_s": -1}),
        EventRecord("decision", BEGIN, "", {"decision_id": 1, "current": {}, "chosen": {}, "candidates": [7]}),
        EventRecord("stall", BEGIN, "", {"round": 1, "seconds": 1e300}),
        EventRecord("finished", BEGIN, "", {}),
        EventRecord("round", math.inf, "", {}),
    ]
    page = page_of([*whole_job(), *broken], tmp_path)
    assert "8 events could not be read and left out" in page.text
    assert "8 events could not be read and left out" in summary_text("job", [*broken])


def test_shade_covers_the_time_before_the_first_step_after_a_stall() -> None:
    events = [round_event(0, 1, 2, "start"), round_event(20, 2, 1, "loss"), stall_event(21, 2, 8.0, "loss")]
    patches = throughput_picture(timeline_of("job", events)).axes[0].patches
    [shade] = [patch for patch in patches if isinstance(patch, Rectangle) and patch.get_width() > 0]
    assert [shade.get_x(), shade.get_x() + shade.get_width()] == pytest.approx([13.0, 21.0])


def test_no_window_of_a_round_is_drawn_after_the_next_round_has_begun() -> None:
    events = [
        round_event(0, 1, 1, "start"),
        profile_event(8, 1, 1, 0.1, 0),
        round_event(10, 2, 2, "grow"),
        profile_event(14, 1, 1, 0.1, 10),
        profile_event(20, 2, 2, 0.1, 20),
    ]
    lines = throughput_picture(timeline_of("job", events)).axes[0].lines
    first = next(line for line in lines if line.get_label() == "samples per second")
    assert np.max(np.asarray(first.get_xdata(), float)) <= 10 + 1.1  # the timeline begins with the first window's first step


def test_step_that_is_cut_off_is_named_with_its_length() -> None:
    events = [round_event(0, 1, 1, "start"), *(profile_event(10 + i, 1, 1, 2.0 if i == 30 else 0.1, 10 * i) for i in range(40))]
    over_time, _ = step_parts_picture(timeline_of("job", events)).axes
    assert [text.get_text() for text in over_time.texts if "cut off" in text.get_text()] == ["cut off: up to 2,000 ms"]


def test_one_cost_has_one_tick() -> None:
    events = whole_job()
    timeline = timeline_of("job", events)
    last = timeline.decisions[-1]
    alone = dataclasses.replace(
        last, chosen=last.current, candidates=tuple(c for c in last.candidates if c.settings == last.current)
    )
    _, choice = plans_picture(dataclasses.replace(timeline, decisions=(alone,))).axes
    assert len(choice.get_xticks()) == 1


def test_no_tick_stands_for_a_part_of_a_core() -> None:
    _, choice = plans_picture(timeline_of("job", whole_job())).axes
    assert choice.get_xlabel() == "cores"
    assert all(tick.is_integer() for tick in choice.get_xticks())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300)
@given(data=st.data())
def test_no_field_of_any_event_can_break_the_summary(data: st.DataObject) -> None:
    events = whole_job()
    place = data.draw(st.integers(0, len(events) - 1))
    fields: dict[str, Any] = dict(events[place].data)
    if fields:
        fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSON)
    events[place] = dataclasses.replace(events[place], data=fields, at=data.draw(st.floats() | st.just(BEGIN)))
    assert summary_text("job", events)


@pytest.mark.slow
@settings(max_examples=4)
@given(data=st.data())
def test_no_number_of_any_event_can_break_the_pictures(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    events = whole_job()
    for _ in range(10):
        place = data.draw(st.integers(0, len(events) - 1))
        fields: dict[str, Any] = dict(events[place].data)
        if fields:
            number = st.sampled_from([0, 1, 10**6, 10**15, 1e-300, 1e15, 0.0])
            fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(number)
        at = data.draw(st.sampled_from([0.0, BEGIN, BEGIN + 1e6, 2e11]))
        events[place] = dataclasses.replace(events[place], data=fields, at=at)
    page_of(events, tmp_path_factory.mktemp("page"))


def test_a_report_replaces_the_one_before(tmp_path: Path) -> None:
    page_of(whole_job(), tmp_path, run_id="first")
    assert "Job second" in page_of(whole_job()[:3], tmp_path, run_id="second").text


def test_explanation_names_measurement_choice_and_result() -> None:
    text = " ".join(explain_text(timeline_of("job", whole_job())).split())
    for part in (
        "1 plan, 1 change; of 1 measured, 1 came out as predicted",
        "1x1 -> 2x1",
        "2 workers are faster",
        "saw 1 worker with 1 thread and 0 loader workers each: 130 ms a step",
        "came out: decision 1, 2x1: 100 ms a step, 1.25 times the 80 ms predicted (inside 70 ms to 100 ms)",
        "cost: unknown, as no prices were given",
        "on the front",
    ):
        assert part in text, text


def test_a_plan_that_was_not_made_cannot_be_explained() -> None:
    with pytest.raises(ValueError, match="has made no plan 7; its plans are 1"):
        explain_text(timeline_of("job", whole_job()), plan=7)


def test_a_job_without_plans_is_explained_as_one() -> None:
    assert explain_text(timeline_of("job", [])) == "job job: the planner recorded no decision."


def test_costs_are_shown_where_prices_are_known() -> None:
    event = decision_event(10, 1)
    candidates = [{**c, "cost_per_hour": 0.5 * n, "cost_to_end": 3.0 / n} for n, c in enumerate(event.data["candidates"], 1)]
    priced = dataclasses.replace(event, data={**event.data, "candidates": candidates, "spent": 0.25})
    text = explain_text(timeline_of("job", [priced]))
    assert "cost: 0.25 until" in text
    assert "0.5 an hour; to the end 3 with 1x1, 1.5 with 2x1" in text


def test_a_long_row_of_plans_to_stay_is_cut() -> None:
    stays = []
    for number in range(1, 40):
        event = decision_event(10 + number, number)
        stays.append(dataclasses.replace(event, data={**event.data, "chosen": event.data["current"]}))
    lines = explain_text(timeline_of("job", stays)).splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("plan ")] == ["plan 1", "plan 2", "plan 3", "plan 39"]


def test_users_style_of_matplotlib_does_not_reach_the_report(tmp_path: Path) -> None:
    events = [round_event(0.0, 1, 1, "start"), profile_event(5.0, 1, 1, 0.1, 0), profile_event(9.0, 1, 1, 0.1, 10)]
    plain, styled = tmp_path / "plain.html", tmp_path / "styled.html"
    write_report("job", events, plain)
    # The first needs a LaTeX, and raises an error without one.
    with matplotlib.rc_context({"text.usetex": True, "lines.linewidth": 9.0, "axes.grid": True}):
        write_report("job", events, styled)
        assert matplotlib.rcParams["lines.linewidth"] == 9.0
    assert styled.read_text() == plain.read_text()


class HeadTexts(HTMLParser):
    """Collects texts in a page's head that are no title and no style."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "meta":
            self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if "head" in self.tags and self.tags[-1] not in ("title", "style") and data.strip():
            self.texts.append(data)


@pytest.mark.parametrize("page", sorted(PACKAGE.rglob("*page.html.j2")), ids=lambda page: f"{page.parent.name}/{page.name}")
def test_head_of_a_page_is_whole_and_shows_no_text(page: Path) -> None:
    style = (PACKAGE / "report" / "style.html.j2").read_text()
    source = page.read_text().replace('{% include "style.html.j2" %}', style)
    head = re.search(r"<head>.*</head>", re.sub(r"\{[%{#].*?[%}#]\}", "", source, flags=re.DOTALL), flags=re.DOTALL)
    assert head
    parser = HeadTexts()
    parser.feed(head.group(0))
    assert (parser.tags, parser.texts) == ([], [])
