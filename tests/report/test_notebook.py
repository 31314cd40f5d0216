"""The picture of a job in a notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_dlrover
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import EventRecord, Keys, encode
from tests.support.recorded_jobs import recorded_job, write


def test_notebook_shows_a_job_and_escapes_its_texts(etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    write(client, keys.run_id, recorded_job())
    client.put(f"{keys.events}9-x", encode(EventRecord("<b>", 1_790_000_109.0, '<script>alert("x")</script>')))
    picture = lightning_dlrover.show(keys.run_id, etcd.endpoint, run_dir=tmp_path)
    html = picture._repr_html_()
    assert "<polyline" in html
    assert "&lt;script&gt;" in html
    assert "<script" not in html
    assert "2 of 3 wanted" in html
    assert f"job: {keys.run_id}, training" in repr(picture)
    assert picture.job.num_workers == 2


def test_unknown_job_is_an_error_that_names_the_place(
    etcd: EmbeddedEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_dlrover.report.notebook.WAIT_S", 0.5)
    with pytest.raises(LookupError, match="has no job 'none'"):
        lightning_dlrover.show("none", etcd.endpoint, run_dir=tmp_path)


def test_package_imports_nothing_for_it() -> None:
    code = "import sys, lightning_dlrover; assert not {'torch', 'grpc', 'starlette', 'jinja2'} & {*sys.modules}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
