"""Fixtures of this folder."""

from __future__ import annotations

import metalmm
import pytest


@pytest.fixture(scope="module")
def device() -> metalmm.Device:
    return metalmm.Device("cpu")
