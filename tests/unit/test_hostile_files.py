"""Files that are not what their name says: nothing of another's is lost, nothing waits, nothing grows with the square."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import metalmm
import pytest
from metalmm import files, tuning
from metalmm.bench import sizes


def test_a_lock_that_is_a_link_empties_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".t.json.lock").symlink_to(victim)
    with pytest.raises(tuning.TuningError, match=r"\.t\.json\.lock.*remove it"):
        tuning.write(tmp_path / "t.json", "x", [])
    assert victim.read_text() == "precious" and not (tmp_path / "t.json").exists()


def test_a_lock_that_is_a_fifo_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".t.json.lock")
    found: list[BaseException] = []

    def write() -> None:
        try:
            tuning.write(tmp_path / "t.json", "x", [])
        except tuning.TuningError as error:
            found.append(error)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and "is no plain file" in str(found[0])


def test_two_names_of_one_file_are_one_lock(tmp_path: Path) -> None:
    """By its own name and by a link, writers wait for one another: no choice is lost."""
    (tmp_path / "link.json").symlink_to(tmp_path / "t.json")

    def write(number: int) -> None:
        for i in range(10):
            tuning.write(tmp_path / ("link.json" if number % 2 else "t.json"), f"device {number} {i}", [])

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (tmp_path / "link.json").is_symlink() and len(tuning.read(tmp_path / "t.json")) == 40


def test_shapes_are_found_again_without_looking_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, equal = 0, sizes.Shape.__eq__

    def counting(one: sizes.Shape, other: object) -> bool:
        nonlocal compared
        compared += 1
        return bool(equal(one, other))

    monkeypatch.setattr(sizes.Shape, "__eq__", counting)
    lines = "".join(f"op=x | batch=1 | m=1 | n={n} | k=64 | tA=0 | tB=1:\nbackend=b: count=2 total=1.0\n" for n in range(1, 401))
    found = sizes.parse(lines * 2)
    assert len(found.shapes) == 400 and found.shapes[0].calls == 4
    assert compared < 4 * 800, "of 800 lines each with each would be 240,000"


def test_the_same_spec_twice_is_one_shape() -> None:
    found = sizes.from_specs(["m=1 n=64 k=64 calls=2", "n=64 k=64 m=1 calls=3", "m=1 n=64 k=65"])
    assert [(s.k, s.calls) for s in found.shapes] == [(64, 5), (65, None)]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
def test_a_file_of_weights_is_a_plain_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.gguf")
    for name in ("f.gguf", "nothing\0there", "none.gguf", "."):
        with pytest.raises(metalmm.ArgumentError):
            metalmm.load_gguf(tmp_path / name, "w")


def test_what_nobody_sees_is_spelled_out() -> None:
    assert files.harmless("a\u202eb\x1b[31m\u00ad") == "a\\x202eb\\x1b[31m\\xad"
    assert files.harmless("a\nb\tc", "\n") == "a\nb\\x09c" and files.harmless("ß ∑") == "ß ∑"
