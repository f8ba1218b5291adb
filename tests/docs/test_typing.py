"""What a type checker, a notebook and a reader of the documentation see: the stub says what the extension has, and every snippet of
README and docs runs and is well typed."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import metalmm
import pytest
from metalmm import _core
from support.here import DEVICE, ROOT

STUB = ast.parse((ROOT / "python" / "metalmm" / "_core.pyi").read_text())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def members(body: list[ast.stmt]) -> dict[str, list[ast.FunctionDef]]:
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


OPTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef) and node.name.endswith("Options")}


def names_of(function: ast.FunctionDef) -> set[str]:
    arguments = function.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    for name, options in OPTIONS.items():
        if arguments.kwarg and f"[{name}]" in ast.unparse(arguments.kwarg):
            names |= {ast.unparse(node.target) for node in options.body if isinstance(node, ast.AnnAssign)}
    return names


def test_the_stub_has_what_the_extension_has() -> None:
    classes = {node.name: members(node.body) for node in STUB.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}
    assert set(classes) == {name for name, value in vars(_core).items() if inspect.isclass(value)}
    for name, stubbed in classes.items():
        real = vars(getattr(_core, name))
        public = {m for m in real if not m.startswith("__")} | {m for m in ("__len__", "__getitem__", "__call__", "__enter__") if m in real}
        assert public <= set(stubbed), f"{name}: the stub lacks {public - set(stubbed)}"
        assert {m for m in stubbed if not m.startswith("__")} <= public, f"{name}: the extension lacks {set(stubbed) - public}"
        for member in public - {"__call__"}:
            try:
                expected = set(inspect.signature(real[member]).parameters)
            except (ValueError, TypeError):
                assert member.startswith("_") or not callable(real[member]), f"{name}.{member} has no signature"
                continue  # a property, or one of nanobind's own
            assert all(names_of(overload) == expected for overload in stubbed[member]), f"{name}.{member}{expected}"
    functions = members(STUB.body)
    assert set(functions) == {n for n, v in vars(_core).items() if callable(v) and not inspect.isclass(v)}
    expected = set(inspect.signature(metalmm.matmul).parameters)
    assert all(names_of(overload) == expected for overload in functions["matmul"])


CHECKED = """
import metalmm
import numpy as np
import numpy.typing as npt
from typing import Any
from typing_extensions import assert_type

x = np.zeros((1, 4), np.float16)
dev = metalmm.Device("cpu", threads=2, guards=True)
w = dev.array(x)
assert_type(metalmm.matmul("a/b", x, x), npt.NDArray[Any])
assert_type(metalmm.matmul("a/b", w, x), metalmm.Array)
assert_type(metalmm.matmul("a/b", x, w), metalmm.Array)
assert_type(metalmm.matmul("a/b", x, w, out=w), metalmm.Array)
with dev.batch() as b:
    assert_type(b, metalmm.Batch)
    assert_type(b.matmul("a/b", w, w), metalmm.Array)
    assert_type(b.matmul("a/b", x, x), npt.NDArray[Any])
with metalmm.Device("cpu") as d:
    assert_type(d, metalmm.Device)
assert_type(w[0, 1:], metalmm.Array)
assert_type(w.dtype, np.dtype[Any])
assert_type(w.numpy(), npt.NDArray[Any])
assert_type(dev.prepare("a/b", w, w)(), metalmm.Array)
assert_type(dev.prepare("a/b", x, x).out, npt.NDArray[Any])
call: metalmm.PreparedCall = dev.prepare("a/b", x, w)
for row in w:
    assert_type(row, metalmm.Array)
"""
WRONG = {
    'metalmm.Device("cpu", thread=2)': "thread",
    'metalmm.matmul("a/b", x, x, transposeb=True)': "overload",
    'metalmm.matmul("a/b", x, [1.0])': "overload",
    'metalmm.MatmulSpec("1", 2, 3)': "arg-type",
    "w.shape = (1, 2)": "read-only",
    'metalmm.Device().compile("x").kernel("k")(x, grid=1, threads=1, threadgroup=1)': "overload",
}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of each text, asked once: most of its time goes to NumPy's stubs."""
    pytest.importorskip("mypy", reason="mypy is not installed: types are NOT tested")
    folder = tmp_path_factory.mktemp("typed")
    start = "import metalmm\nimport numpy as np\nx = np.zeros((1, 4), np.float16)\nw = metalmm.Device().array(x)\n"
    texts = {"good": CHECKED, "wrong": start + "\n".join(WRONG)}
    texts |= {snippets_name(page): "\n".join(code for _, code in snippets(page)) for page in PAGES if snippets(page)}
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / "build" / "mypy"), *(f"{name}.py" for name in texts)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={"MYPYPATH": str(ROOT / "python"), "PATH": ""})
    assert re.search(r"^Found \d+ error", done.stdout, re.MULTILINE), done.stdout + done.stderr
    return {name: [row for row in done.stdout.splitlines() if row.startswith(f"{name}.py:")] for name in texts}


def snippets_name(page: Path) -> str:
    return f"{page.stem.lower()}_snippets"


def test_types_of_results_and_of_mistakes(complaints: dict[str, list[str]]) -> None:
    assert complaints["good"] == []
    rows = complaints["wrong"]
    for line, what in enumerate(WRONG.values(), start=5):
        assert any(f":{line}: " in row and what in row for row in rows), f"{list(WRONG)[line - 5]}: {rows}"


def snippets(page: Path) -> list[tuple[int, str]]:
    """The Python of a page with the lines where it begins."""
    text = page.read_text()
    return [(text[: m.start()].count("\n") + 2, m[1]) for m in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


def written_files(page: Path) -> dict[str, str]:
    """Blocks that the page names: **1. The kernel**, `mine.metal`."""
    pattern = r"`([\w.]+\.(?:metal|toml))`(?:(?!```|`[\w.]+\.(?:metal|toml)`).)*?```(?:metal|toml)\n(.*?)^```"
    return {m[1]: m[2] for m in re.finditer(pattern, page.read_text(), re.MULTILINE | re.DOTALL)}


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda p: p.name)
def test_every_snippet_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in written_files(page).items():
        (tmp_path / name).write_text(text)
    space: dict[str, Any] = {"__name__": "snippet"}
    for line, code in snippets(page):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), space)


@pytest.mark.skipif(DEVICE != "cpu", reason="the same text on every device")
@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda p: p.name)
def test_every_snippet_is_well_typed(page: Path, complaints: dict[str, list[str]]) -> None:
    assert complaints[snippets_name(page)] == []


def test_the_pages_have_snippets() -> None:
    assert sum(len(snippets(p)) for p in PAGES) >= 4
    assert {"mine.metal", "my.toml", "mine_quantized.metal", "my_quantized.toml"} <= set(written_files(ROOT / "docs" / "add_a_variant.md"))
