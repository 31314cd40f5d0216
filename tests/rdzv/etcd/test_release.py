"""Warnings about unsupported releases of etcd."""

from __future__ import annotations

import pytest

from lightning_dlrover.rdzv.etcd.health import version_warning


@pytest.mark.parametrize("version", ["3.3.27", "3.4.43", "3.5.1", "3.5.29", "3.6.10"])
def test_a_release_that_leaks_other_users_prefixes_is_named(version: str) -> None:
    assert version in (version_warning(version) or "")


@pytest.mark.parametrize("version", ["3.4.44", "3.5.30", "3.6.11", "3.7.0", "4.0.0", "unreadable"])
def test_a_fixed_release_is_not_complained_about(version: str) -> None:
    assert version_warning(version) is None
