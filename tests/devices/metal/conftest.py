"""Fixtures of this folder."""

from __future__ import annotations

import metalmm
import pytest


@pytest.fixture(scope="module")
def device() -> metalmm.Device:
    """Of this file: see _these_choose_their_gpu."""
    return metalmm.Device("metal")
