"""Fixtures of this folder."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import metalmm
import pytest
from support.cuda import FAKE, fresh


@pytest.fixture(scope="module")
def device() -> Iterator[metalmm.Device]:
    """Of this file, so that its end is seen."""
    with metalmm.Device("cuda") as device:
        yield device


@pytest.fixture(autouse=True)
def no_rule_of_cuda_is_broken() -> Iterator[None]:
    yield
    if FAKE:
        assert FAKE.take_violations() == []
        assert FAKE.clear_faults() == 0, "a fault that nothing came by"


@pytest.fixture
def like() -> Iterator[Callable[..., None]]:
    """The fake GPU is like that from now on."""
    before: dict[str, int] = {}

    def change(**settings: int) -> None:
        for name, value in settings.items():
            before.setdefault(name, FAKE.set(name, value))

    yield change
    gc.collect()
    for name, value in before.items():
        FAKE.set(name, value)


@pytest.fixture
def index(like: Callable[..., None]) -> int:
    """Of a GPU that may be lost."""
    like(devices=next(fresh) + 1)
    return len(metalmm._core._device_names("cuda")) - 1


@pytest.fixture
def other(index: int) -> Iterator[metalmm.Device]:
    with metalmm.Device("cuda", index=index) as device:
        yield device
