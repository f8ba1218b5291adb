"""The pytest fixture ``metalmm_check``: a test fails where :func:`metalmm.check` finds something.

``pytest_plugins = ["metalmm.pytest_plugin"]`` in the root conftest.py brings it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def metalmm_check() -> Callable[..., None]:
    """Takes what :func:`metalmm.check` takes."""
    from .checking import check  # not before a test asks: a run of pytest elsewhere need not load it

    def run(*args: Any, **options: Any) -> None:
        found = check(*args, **options)
        assert not found, "\n".join(map(str, found))

    return run
