"""Fixtures of this folder."""

from __future__ import annotations

import metalmm
import pytest


@pytest.fixture
def device() -> metalmm.Device:
    return metalmm.Device("cpu")
