"""Files, folders, compilers and words that are not as they should be: each gets an error or a warning that says what, and the library
stays usable."""

from __future__ import annotations

import sys
from pathlib import Path

import metalmm
import numpy as np
import pytest
from support.here import ROOT
from support.surroundings import ANEW, MANIFEST, _write


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("one =", '"a/b" =', "the name 'a/b'; it takes letters"),
        ("one =", '"" =', "the name ''"),
        ("two =", "one =", "my.toml: "),
        ('["nn"]', '["nn", "nn"]', "supports.layouts is \\['nn', 'nn'\\]; it names one of them twice"),
        ('["nn"]', "5", "'layouts' is 5; it takes a list of strings"),
        ('["nn"]', "[[]]", "'layouts' is \\[\\[\\]\\]"),
        ("threads = 64", 'threads = 64\ndevices = ["cpu", "cpu"]', "devices is \\['cpu', 'cpu'\\]; it names one of them twice"),
        ("threads = 64", "threads = 64\ndevices = 3", "'devices' is 3; it takes a list"),
        ("threads = 64", "threads = 64\nbaseline = 3", "'baseline' is 3"),
        ("threads = 64", "threads = 0", "threads is 0; Metal allows 1 to 1024"),
        ("tile = [1, 64]", "tile = [0, 64]", "tile is \\[0, 64\\]"),
        ("m = 1", "n = [0]", "supports.n is \\[0\\]"),
        ("threads = 64", "threads = true", "'threads' is True, of the wrong type"),
        ('template = ["threads"]', 'template = ["threads", "bk"]\nbk = 4294967296', "'bk' is 4294967296; it takes -2\\^31 to 2\\^32 - 1"),
        ("tile = [1, 64]", "tile = [1, 4294967296]", "tile is \\[1, 4294967296\\]"),
        ("m = 1", "m = 4294967296", "supports.m goes from"),
        ("m = 1", "m = true", "supports.m is True"),
        ("m = 1", "n = [1, 4294967296]", "supports.n is"),
        ("m = 1", "n = []", "supports.n is \\[\\]"),
        ("tile = [1, 64]", "tile = [1, 64]\ntiles = [1, 64]", "unknown key 'tiles'; did you mean 'tile'\\?"),
        ("threads = 64", 'threads = 64\nalike_by = ["split"]', r"alike_by is \['split'\]; it lists some of threads"),
        ("threads = 64", 'threads = 64\nalike_by = [""]', r"alike_by is \[''\]; it lists some of threads"),
        (
            "threads = 64",
            'threads = 64\nalike_by = ["threads", "threads"]',
            r"alike_by is \['threads', 'threads'\]; it names one of them twice",
        ),
        ("threads = 64", "threads = 64\nquantum = 3", "unknown key 'quantum'; it is neither a field nor among the template's arguments"),
        ('source = "mine.metal"', f'source = "{"x" * 5000}"', "source .*"),
        ('source = "mine.metal"', 'source = "a\\u0000b"', "mine/one: "),
        ("threads = 64", 'threads = 64\nlibrary = "mps_matmul"\ndevices = ["cpu"]', "mps_matmul is there on metal alone"),
        ("threads = 64", 'threads = 64\nlibrary = "nobodys"', "library is 'nobodys'"),
        ("format = 2", "format = 2\nfamilly = 3", "'familly' is no part of a manifest"),
        ("format = 2", f"format = 2\nx = {'[' * 5000}{']' * 5000}", "nested too deeply|my.toml: "),
        ("two = {}", "", None),
    ],
)
def test_manifests(old: str, new: str, message: str | None, tmp_path: Path) -> None:
    (tmp_path / "mine.metal").write_text("")
    (tmp_path / "my.toml").write_text(MANIFEST.replace(old, new))
    before = metalmm.variants()
    if message is None:
        assert metalmm.load_variants(tmp_path / "my.toml") == ["mine/one"]
        return
    with pytest.raises(metalmm.ManifestError, match=message):
        metalmm.load_variants(tmp_path / "my.toml")
    assert metalmm.variants() == before, "nothing of it is loaded"


def test_a_manifest_that_fails_at_its_end_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.metal").write_text("")
    (tmp_path / "my.toml").write_text(MANIFEST.replace("two = {}", "two = { threads = 5000 }"))
    with pytest.raises(metalmm.ManifestError, match=r"mine/two: threads is 5000"):
        metalmm.load_variants(tmp_path / "my.toml")
    with pytest.raises(metalmm.UnknownVariantError):
        metalmm.matmul("mine/one", np.ones((1, 4), np.float16), np.ones((4, 4), np.float16))


def test_a_library_runs_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(MANIFEST.replace('kernel = "f"', 'library = "blas"\ntile = [1, 64]\nsupports = { layouts = ["nn"] }'))
    loaded = metalmm.load_variants(tmp_path / "my.toml")
    assert {v.devices for v in loaded} == {("cpu", "cuda")}


def test_a_family_where_a_variant_is_wanted_lists_its_members() -> None:
    with pytest.raises(metalmm.UnknownVariantError, match=r"'gemv'; it is a family; its members are gemv/baseline, gemv/smalln"):
        metalmm.matmul("gemv", np.ones((1, 4), np.float16), np.ones((4, 4), np.float16))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('template = ["threads"]', 'template = ["threads", "a-b"]', "template has 'a-b'; it lists names of parameters, or a type"),
        *(
            ('template = ["threads"]', f'template = ["threads", "{odd}"]', "it lists names of parameters, or a type")
            for odd in ("", "a b", "threads, threads", "threads>", "Pair<threads", "Pair<>", "Pair<4x", "Pair<ähnlich>", "a;b", "x::y")
        ),
        ('template = ["threads"]', 'template = ["Pair<threads, nobody>"]', "template argument 'nobody' has no value"),
        ("one = { threads = 32 }", 'one = { threads = 32, without = { float32 = "" } }', "'without.float32' is empty; it says why"),
        ("one = { threads = 32 }", "one = { threads = 32, type = 1 }", "unknown key 'type'|what the call decides"),
        ('tile = [1, "threads"]', 'tyle = [1, "threads"]', r"unknown key 'tyle'; did you mean 'tile'\?"),
        ('tile = [1, "threads"]', f'tile = [1, "{"-" * 100000}1"]', "tile is"),
        ("supports = { layouts", "supports = { layout", r"supports knows nothing of 'layout'; did you mean 'layouts'\?"),
        ("[families.anew]\n", '[families.empty]\nkernel = "fill"\n[families.anew]\n', "family empty has no variants"),
        ("format = 2", "format = 1", "format is 1; this metalmm reads format = 2"),
        ('kernel = "fill"\n', "", "anew/one: 'kernel' is missing"),
        ('kernel = "fill"\n', "kernel = 3\n", "'kernel' is 3; it takes the name of a table"),
    ],
)
def test_manifests_of_format_2(old: str, new: str, message: str, tmp_path: Path) -> None:
    before = metalmm.variants()
    with pytest.raises(metalmm.ManifestError, match=message):
        metalmm.load_variants(_write(tmp_path, manifest=ANEW.replace(old, new)))
    assert metalmm.variants() == before


def test_manifests_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text('format = 2\n[[family]]\nfoo = "x"\n')
    for path in (tmp_path / "m.toml", "\0", "\ud800", tmp_path / "not there.toml"):
        with pytest.raises(metalmm.ManifestError):
            metalmm.load_variants(path)
    for wrong in (3, None, b"x"):
        with pytest.raises(metalmm.ArgumentError, match="load_variants: path is"):
            metalmm.load_variants(wrong)  # type: ignore[arg-type]
    (tmp_path / "m.toml").write_text("format = 2\n")
    with pytest.raises(metalmm.ManifestError, match="there are no variants in it"):
        metalmm.load_variants(tmp_path / "m.toml")
    kernels = Path(metalmm.variants()[0].source).parent
    stolen = f'format = 2\n[kernels.gemv]\nsource = "{kernels / "gemv.metal"}"\ntemplate = ["type", "threads"]\ntile = [1, 32]\n'
    (tmp_path / "m.toml").write_text(
        stolen + 'supports = { layouts = ["nn"] }\n[families.gemv.variants]\nbaseline = { kernel = "gemv", threads = 32 }\n'
    )
    with pytest.raises(metalmm.ManifestError, match=r"gemv/baseline: there is a variant of this id in .*variants\.toml"):
        metalmm.load_variants(tmp_path / "m.toml")


def test_the_wheel_for_macos_says_14(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the macOS of who builds it; CMakeLists.txt, whose compiler flags it must fit, is not asked for the tag."""
    macos = pytest.importorskip("scikit_build_core.builder.macos")
    settings = pytest.importorskip("scikit_build_core.settings.skbuild_read_settings")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.mac_ver", lambda: ("15.4", ("", "", ""), "arm64"))
    monkeypatch.delenv("MACOSX_DEPLOYMENT_TARGET", raising=False)
    define = settings.SettingsReader.from_file(ROOT / "pyproject.toml", {}).settings.cmake.define
    assert str(macos.get_macosx_deployment_target(arm=True, cmake_defines=define)) == "14.0"
    assert "set(CMAKE_OSX_DEPLOYMENT_TARGET 14.0 " in (ROOT / "CMakeLists.txt").read_text()
