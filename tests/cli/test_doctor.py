"""metalmm doctor: it ends, says what does not work and what is done instead, and goes on after what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from metalmm import cli, doctor, doctor_rows, tuning
from metalmm.bench.sizes import Shape
from support.here import ALL_OF_IT, DEVICE, FAKE, FAKE_CUDA, ROOT

pytestmark = pytest.mark.rest  # each compiles for seconds
needs_fake = pytest.mark.skipif(not FAKE, reason="injects faults, which only the fake Metal allows")
SHAPE = Shape("x", 1, 1, 32, 64, False, True, False, 1.0, 0.0)
of_any_device = pytest.mark.skipif(bool(FAKE_CUDA), reason="compiles for seconds what device cpu and the fake Metal have shown")


def run(tmp_path: Path, *arguments: str, seconds: float = 100) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "doctor.json"
    path.unlink(missing_ok=True)
    status = cli.main(["doctor", "--device", DEVICE, "--seconds", str(seconds), "--json", str(path), *arguments])
    return status, json.loads(path.read_text())


def states(data: dict[str, Any]) -> dict[str, str]:
    return {f"{c['section'].split(':')[0].split(',')[0]}/{c['name']}": c["state"] for c in data["checks"]}


@pytest.fixture(autouse=True)
def _few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a first run compiles and measures in seconds."""
    monkeypatch.setattr(doctor, "_ROUNDS", 3)
    monkeypatch.setattr(doctor_rows, "_ROUNDS", 3)
    monkeypatch.setattr(doctor_rows.runner, "last_level_cache", lambda device: 1 << 17)
    monkeypatch.setattr(doctor.copy, "measured_copy", lambda device: 100.0)
    families = ("gemv", "gemm_tiled", "mps", "blas", "planted")
    monkeypatch.setattr(doctor, "variants", lambda *a, **k: [v for v in metalmm.variants(*a, **k) if v.family in families])
    monkeypatch.setattr(doctor_rows.sizes, "load", lambda: type("Sizes", (), {"shapes": [SHAPE]})())


@of_any_device
def test_all_is_well_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, data = run(tmp_path)
    found = states(data)
    assert status == 0 and data["finished"] and set(found.values()) <= {"ok", "without", "skipped"}, data["checks"]
    assert (data["schema"], data["version"]) == ("metalmm-doctor", 2)
    assert data["environment"]["device"] == DEVICE
    assert found["results/gemv"] == found["features/recordings"] == found["features/many submissions in flight"] == "ok"
    assert all(c["seconds"] >= 0 for c in data["checks"])
    out = capsys.readouterr().out
    assert "results: one variant of each family" in out and f"{list(found.values()).count('ok')} ok" in out


def test_the_time_is_kept_and_what_was_left_out_is_named(tmp_path: Path) -> None:
    status, data = run(tmp_path, seconds=0)
    assert status == 0 and set(states(data).values()) == {"skipped"}


def test_what_was_finished_before_ctrl_c_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: doctor.Doctor) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor.Doctor, "features", interrupt)
    assert cli.main(["doctor", "--seconds", "5", "--json", str(tmp_path / "d.json")]) == 130
    data = json.loads((tmp_path / "d.json").read_text())
    assert not data["finished"] and data["checks"] and {c["section"].split(":")[0] for c in data["checks"]} == {"kernels", "results"}


@of_any_device
def test_a_wrong_variant_is_wrong_and_the_others_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "bad.metal").write_text(
        '#include <metal_stdlib>\n#include "params.h"\nusing namespace metal;\n'
        "template <int TG> [[kernel, max_total_threads_per_threadgroup(TG)]] void bad(const device half* A [[buffer(0)]], const device half* B [[buffer(1)]],\n"
        "    device half* D [[buffer(2)]], const device half* C [[buffer(3)]], const device half* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]],\n"
        "    uint i [[thread_index_in_threadgroup]]) { for (uint n = i; n < p.n; n += TG) D[n] = half(n == 5 ? 1.0f : 0.0f); }\n"
    )
    (tmp_path / "bad.toml").write_text(
        'format = 2\n[kernels.bad]\ntemplate = ["threads"]\ntile = [1, 0]\nsupports = { m = 1, layouts = ["nn"] }\n'
        '[families.planted.variants]\nwrong = { kernel = "bad", threads = 32 }\n'
    )
    status, data = run(tmp_path, "--manifest", str(tmp_path / "bad.toml"))
    found = states(data)
    assert status == 1
    assert [name for name, state in found.items() if state == "wrong"] == ["results/planted"]
    assert found["features/recordings"] == "ok"


def test_a_row_has_what_auto_takes_first_and_libraries_hot_and_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold calls go over several copies of the weights; nothing is timed that is wrong."""
    asked = list[list[Any]]()

    def seconds(calls: list[Any]) -> float:
        asked.append(calls)
        return float(len(calls))

    monkeypatch.setattr(doctor_rows, "_median", seconds)
    with metalmm.Device(DEVICE) as device:
        row = doctor_rows.measure(device, SHAPE)
        assert next(iter(row.hot)) == tuning.choose(device, SHAPE.spec)[0] and row.hot.keys() == row.cold.keys()
        libraries = {str(v) for v in metalmm.variants(SHAPE.spec, device=device) if v.library}
        assert libraries <= row.hot.keys() and (libraries or DEVICE != "cpu")
        assert set(row.hot.values()) == {1.0} and min(row.cold.values()) > 1 and len(asked) == 2 * len(row.hot)
        monkeypatch.setattr(doctor_rows.runner.Inputs, "judge", lambda *_: "is wrong")
        with pytest.raises(ValueError, match="is wrong"):
            doctor_rows.measure(device, SHAPE)


def test_sums_that_are_not_of_float32_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What float16 would lose at each step of a sum, within the bound of float32's worst case."""
    device = doctor.Doctor(DEVICE, 60, quiet=True)
    device.sums_of_mps()
    assert device.checks[-1].state in ("ok", "without")
    if device.checks[-1].state == "without":
        pytest.skip("no library here")

    def coarse(v: str, a: Any, b: Any, device: metalmm.Device) -> Any:
        total = np.zeros((1, b.shape[1]), np.float16)
        for i in range(a.shape[1]):
            total = (total + a[:, i : i + 1] * b[i]).astype(np.float16)
        return total

    monkeypatch.setattr(doctor, "matmul", coarse)
    device.sums_of_mps()
    assert device.checks[-1].state == "wrong", device.checks[-1]


@needs_fake
@pytest.mark.parametrize("fault", ["command_buffer_status", "library", "indirect", "mps"])
def test_a_fault_is_found_and_does_not_end_it(fault: str, tmp_path: Path) -> None:
    FAKE.inject(fault, 2)
    try:
        status, data = run(tmp_path)
    finally:
        FAKE.inject(fault, 0)
    found = list(states(data).values())
    assert status == 1 and 1 <= found.count("wrong") <= 2, data["checks"]
    assert found.count("ok") > 10


@needs_fake
def test_what_a_virtual_gpu_lacks_is_without_and_not_wrong(tmp_path: Path) -> None:
    before = {name: FAKE.set(name, value) for name, value in (("apple_family", 5), ("mps", 0), ("no_copy_zero", 1), ("counters", 0))}
    try:
        status, data = run(tmp_path)
    finally:
        for name, value in before.items():
            FAKE.set(name, value)
    found = states(data)
    assert status == 0
    assert data["lacking"] == ["simdgroup_matrix", "mps", "tensor_ops"]
    for name in (
        "features/times of each dispatch",
        "features/recordings",
        "features/pages of NumPy's in place",
        "the library's sums of float16/sums that cancel",
    ):
        assert found[name] == "without"


@needs_fake
def test_each_option_is_tried_and_one_that_pays_is_recommended(tmp_path: Path) -> None:
    before = {name: FAKE.set(name, value) for name, value in (("in_time", 1), ("status_lag_us", 3000))}
    try:
        status, data = run(tmp_path)
    finally:
        for name, value in before.items():
            FAKE.set(name, value)
    (recommended,) = [c for c in data["checks"] if c["name"] == "recommended"]
    assert status == 0
    assert recommended["data"]["options"]["return_on_event"] is True
    tried = [c["name"] for c in data["checks"] if c["section"].startswith("options")]
    assert [t.split("=")[0] for t in tried[1:-2]] == ["return_on_event", "untracked", "first_commit", "indirect"]


@needs_fake
def test_what_may_take_the_process_with_it_comes_last(tmp_path: Path) -> None:
    before = FAKE.set("apple_family", 8)
    try:
        _, data = run(tmp_path)
    finally:
        FAKE.set("apple_family", before)
    tried = [c["name"] for c in data["checks"]]
    assert tried[-4:] == ["the defaults", "indirect=True", "the defaults, again", "recommended"]
    assert not [name for name in tried[:-4] if name.startswith("indirect")]


SECTIONS = ("kernels", "results", "features", "the library", "a whole call", "shapes", "options", "pipelines")


@needs_fake
@pytest.mark.parametrize("section", SECTIONS if ALL_OF_IT else SECTIONS[::3])
def test_an_abort_keeps_what_came_before(section: str, tmp_path: Path) -> None:
    """Apple's validation ends the process where it finds something: here it is asked for a buffer past the limit."""
    script = tmp_path / "s.py"
    script.write_text(
        "import on_fake_metal\nfrom metalmm import cli, doctor\nbefore = doctor.Doctor.check\n"
        "doctor.Doctor.check = lambda self, name, work: before(self, name, "
        f"lambda: on_fake_metal.fake.misuse('too-long') if self._section.startswith({section!r}) else 'left out')\n"
        f"cli.main(['doctor', '--device', 'metal', '--json', {str(tmp_path / 'd.json')!r}])\n"
    )
    command = [sys.executable, str(ROOT / "tests" / "fakes" / "on_fake_metal.py"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "METALMM_FAKE": "validation=1"}, timeout=120)
    data = json.loads((tmp_path / "d.json").read_text())
    assert done.returncode == -signal.SIGABRT and not data["finished"], done.stderr
    *kept, last = data["checks"]
    assert last["state"] == "running" and last["section"].startswith(section)
    assert {c["state"] for c in kept} <= {"ok"} and len({c["section"] for c in kept}) == SECTIONS.index(section)


@of_any_device
def test_each_failure_keeps_its_whole_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * 500 + "\nerror: one\nand more"

    def fail(device: Any, v: Any, spec: Any) -> None:
        raise metalmm.CompileError(f"{v}: {long}")

    monkeypatch.setattr(doctor._core, "_prepare_pipeline", fail)
    status, data = run(tmp_path)
    (check,) = [c for c in data["checks"] if c["section"].startswith("kernels") and c["name"] == "gemv"]
    assert status == 1 and check["state"] == "wrong"
    assert len(check["data"]["failures"]) > 1 and all(long in text for text in check["data"]["failures"].values())


def test_a_share_that_would_overwrite_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tuning.json"
    path.write_text('{"schema": "metalmm-tuning", "version": 1, "devices": {}}')
    assert cli.main(["doctor", "--device", DEVICE, "--seconds", "0", "--share", str(path)]) == 2
    assert path.read_text().endswith('"devices": {}}') and "no file of doctor --share of ours" in capsys.readouterr().err
    new = tmp_path / "new.json"
    assert cli.main(["doctor", "--device", DEVICE, "--seconds", "0", "--share", str(new), "--json", str(new)]) == 2
    assert cli.main(["doctor", "--device", DEVICE, "--seconds", "nan"]) == 2
    assert cli.main(["doctor", "--device", DEVICE, "--seconds", "0", "--share", str(new)]) == 0
    assert not new.exists() and "is not written: no shape was measured" in capsys.readouterr().out


def test_what_names_somebody_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_rows, "_names", lambda: ["jane", "janes-mac"])
    for text in (
        "'/Users/jane doe/Library/x.metal'",
        "file:///Users/jane/x.metal",
        "-I/Users/o'brien/inc/x",
        "~jane/p/x",
        "janes-mac.local",
        "/var/f/T/x",
    ):
        plain = doctor_rows._plain({"k": [text]})["k"][0]
        assert "jane" not in plain and "brien" not in plain and "/var" not in plain, plain
    assert doctor_rows._plain("gemv_nt/l4_d7_tg64: 3 of 4 GB/s") == "gemv_nt/l4_d7_tg64: 3 of 4 GB/s"


def test_a_bad_file_among_the_shared_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "resource", lambda name: tmp_path)
    (tmp_path / "x.json").write_text('{"schema": "metalmm-tuning", "version": 2, "devices": {}}')
    (tmp_path / "y.json").mkdir()
    tuning._collected.cache_clear()
    try:
        with metalmm.Device(DEVICE) as device, pytest.warns(UserWarning, match="the file is left out"):
            assert tuning.choose(device, metalmm.MatmulSpec(1, 64, 64, transpose_b=True))[0]
    finally:
        tuning._collected.cache_clear()


@of_any_device
def test_a_shared_file_is_a_table_for_auto_and_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, shape = tmp_path / "share.json", doctor_rows.shapes()[0]
    run(tmp_path, "--share", str(path))
    text = path.read_text()
    assert len(text) < doctor_rows._SHARED_BYTES and str(Path.home()) + "/" not in text and "registry_id" not in text
    with metalmm.Device(DEVICE) as device:
        (choices,) = tuning.read(path).values()
        assert tuning.read(path).keys() == {tuning.device_key(device)}
        found = {c.key.storage for c in choices} | {str(c.key.m) for c in choices}
        assert found >= {"dense", "q8_0", "q4_0", "affine4", "1", "4", "512"}, found
        try:
            metalmm.load_tuning(path)
            assert tuning.choose(device, shape.spec)[1].startswith("tuned on this shape")
        finally:
            tuning._loaded = None
        monkeypatch.setattr(tuning, "resource", lambda name: tmp_path)
        tuning._collected.cache_clear()
        try:
            (tmp_path / "doctor.json").unlink()
            variant, why = tuning.choose(device, shape.spec)
            assert why.startswith("tuned on this shape") and why.endswith("by others, in docs/lab/gpus"), why
            assert variant == next(c.variant for c in choices if c.key == tuning.Key.of(shape.spec))
        finally:
            tuning._collected.cache_clear()


TIMES = {"batch_us": 100.0, "call_us": 100.0, "replay_us": 100.0}


@needs_fake
@pytest.mark.parametrize(
    ("name", "key", "us", "again", "recommended"),
    [
        ("return_on_event", "call_us", 89, 100, True),
        ("return_on_event", "call_us", 91, 100, False),
        ("return_on_event", "call_us", 89, 95, False),
        ("return_on_event", "batch_us", 50, 100, False),
        ("untracked", "batch_us", 89, 100, True),
        ("first_commit", "batch_us", 89, 100, True),
        ("indirect", "replay_us", 89, 100, True),
        ("untracked", "batch_us", None, 100, False),  # it failed
    ],
)
def test_an_option_is_recommended_where_it_saves_a_tenth_of_its_own_time(
    name: str, key: str, us: float | None, again: float, recommended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(self: doctor.Doctor, what: str, options: dict[str, Any]) -> dict[str, Any] | None:
        if us is None and name in options:
            return None
        return {**TIMES, key: us} if name in options else {**TIMES, key: again} if "again" in what else TIMES

    monkeypatch.setattr(doctor.Doctor, "_timed", timed)
    device = doctor.Doctor("metal", 60, quiet=True)
    device.options()
    assert (name in device.checks[-1].data["options"]) == recommended


@pytest.mark.parametrize(("part", "words"), [(0.9, "within the bound"), (1.1, "past the bound")])
def test_sums_are_judged_within_the_bound_and_past_it(part: float, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = doctor.Doctor(DEVICE, 60, quiet=True)
    if not any(v.library for v in doctor.variants(device=device.device)):
        pytest.skip("no library here")

    def off(v: str, a: Any, b: Any, device: metalmm.Device) -> Any:
        return metalmm.reference(a, b) + part * metalmm.error_bound(a, b)

    monkeypatch.setattr(doctor, "matmul", off)
    device.sums_of_mps()
    assert device.checks[-1].state == "wrong" and words in device.checks[-1].what
