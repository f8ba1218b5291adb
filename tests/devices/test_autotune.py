"""Device(autotune=True) measures a shape when it is first used, and keeps what was fastest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import metalmm
import numpy as np
import pytest
from metalmm import tuning
from metalmm.bench import autotune, runner


@pytest.fixture(name="file")
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tuning file that is not there yet, and none loaded."""
    path = tmp_path / "tuning.json"
    monkeypatch.setattr(tuning, "default_path", lambda: path)
    monkeypatch.setattr(tuning, "_loaded", None)
    monkeypatch.setattr(autotune, "_tried", set())
    metalmm._core._forget_choices()
    yield path
    monkeypatch.undo()
    metalmm._core._forget_choices()


def operands(m: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m)
    return rng.standard_normal((m, 96)).astype(np.float16), rng.standard_normal((64, 96)).astype(np.float16)


def is_right(found: object, a: np.ndarray, b: object) -> bool:
    options = {"transpose_b": True} if isinstance(b, np.ndarray) else {}
    return bool((abs(np.asarray(found) - metalmm.reference(a, b, **options)) <= metalmm.error_bound(a, b, **options)).all())


def test_the_first_use_measures_and_keeps(device: metalmm.Device, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands(1)
    q = metalmm.quantize(b, "q8_0")
    with metalmm.Device(device.name, autotune=True) as own:
        assert is_right(metalmm.matmul("auto", a, b, transpose_b=True, device=own), a, b)
        assert is_right(metalmm.matmul("auto", a, q, device=own), a, q)
        kept = {c.key.storage: c for c in tuning.read(file)[tuning.device_key(own)]}
        assert set(kept) == {"dense", "q8_0"}
        spec = metalmm.MatmulSpec(1, 64, 96, transpose_b=True)
        assert own.prepare("auto", a, b, transpose_b=True).variant == kept["dense"].variant
        assert tuning.choose(own, spec)[1].startswith("tuned on this shape")
        monkeypatch.setattr(runner, "run_shape", None)  # not again, nor by another device
        metalmm.matmul("auto", a, b, transpose_b=True, device=own)
    with metalmm.Device(device.name, autotune=True) as other:
        metalmm.matmul("auto", a, b, transpose_b=True, device=other)


def test_what_it_measures_is_the_rules_best_few(device: metalmm.Device, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of them is kept, whatever the rule says."""
    seen = []
    real = runner.run_shape

    def run_shape(*args: object, **options: object) -> runner.ShapeRun:
        done = real(*args, **options)  # type: ignore[arg-type]
        seen.append([r.variant for r in done.results])
        for r in done.results:  # as if the last were the fastest
            r.cpu, r.gpu, r.stopped = [1.0 - 0.5 * (r is done.results[-1])] * 8, [None] * 8, ""
        done.twin = None
        return done

    monkeypatch.setattr(runner, "run_shape", run_shape)
    a, b = operands(4)
    spec = metalmm.MatmulSpec(4, 64, 96, transpose_b=True)
    with metalmm.Device(device.name, autotune=True) as own:
        rule = tuning.choose(own, spec)[0]
        call = own.prepare("auto", a, b, transpose_b=True)
    assert len(seen) == 1 and 2 <= len(seen[0]) <= 4 and seen[0][0] == rule and len(set(seen[0])) == len(seen[0])
    assert call.variant == seen[0][-1] != rule


def test_by_default_nothing_is_measured(device: metalmm.Device, file: Path) -> None:
    a, b = operands(2)
    assert not device.autotune
    metalmm.matmul("auto", a, b, transpose_b=True, device=device)
    assert not file.exists()


def test_rows_alike_are_one_shape(device: metalmm.Device, file: Path) -> None:
    with metalmm.Device(device.name, autotune=True) as own:
        for m in (1, 3, 16):
            a, b = operands(m)
            metalmm.matmul("auto", a, b, transpose_b=True, row_invariant=True, device=own)
        assert [c.key.row_invariant for c in tuning.read(file)[tuning.device_key(own)]] == [True]


def test_a_file_that_cannot_be_kept(device: metalmm.Device, file: Path) -> None:
    """The result is there, and a warning says why it is not kept."""
    file.parent.joinpath(f".{file.name}.lock").mkdir()
    a, b = operands(1)
    with metalmm.Device(device.name, autotune=True) as own:
        with pytest.warns(UserWarning, match="autotune: .* is not tuned, or not kept: .*lock.*METALMM_TUNING names another"):
            found = metalmm.matmul("auto", a, b, transpose_b=True, device=own)
        assert is_right(found, a, b) and not file.exists()
        metalmm._core._forget_choices()
        metalmm.matmul("auto", a, b, transpose_b=True, device=own)  # without another warning, nor measured again


def test_what_it_is_told(device: metalmm.Device) -> None:
    with pytest.raises(metalmm.ArgumentError, match="autotune is 1; it takes True or False"):
        metalmm.Device(device.name, autotune=1)  # type: ignore[arg-type]


def test_a_file_of_before_is_read(device: metalmm.Device, file: Path) -> None:
    """Its keys have no row_invariant."""
    key = tuning.Key.of(metalmm.MatmulSpec(1, 64, 96, transpose_b=True))
    tuning.write(file, "cpu: x", [tuning.Choice(key, "gemm_tiled/baseline", None, 1.0, "today")])
    data = json.loads(file.read_text())
    for choice in data["devices"]["cpu: x"]:
        del choice["key"]["row_invariant"]
    file.write_text(json.dumps(data))
    assert tuning.read(file)["cpu: x"][0].key == key


def test_a_file_that_is_named_and_not_there(device: metalmm.Device, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALMM_TUNING", str(file))
    a, b = operands(1)
    with metalmm.Device(device.name, autotune=True) as own:
        assert is_right(metalmm.matmul("auto", a, b, transpose_b=True, device=own), a, b)
        assert len(tuning.read(file)[tuning.device_key(own)]) == 1


def test_what_looks_at_accesses_is_not_measured(file: Path) -> None:
    a, b = operands(1)
    with metalmm.Device("cpu", debug=True, autotune=True) as own:
        metalmm.matmul("auto", a, b, transpose_b=True, device=own)
    assert not file.exists()
