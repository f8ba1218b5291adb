"""From shapes to a decision: bench by its rule, broken and interrupted runs, tune and "auto", the step, comparisons, the page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import metalmm
import pytest
from metalmm import cli, files
from metalmm.bench import html as page_html
from metalmm.bench import sizes, statistics, step
from support.decide import FEW, QUICK, SMALL, bench


def test_the_plan_of_the_seeds_profile() -> None:
    plan = step.plan_of(sizes.load(), None)
    assert plan.steps == 95
    assert [(s.n, s.k, count) for s, count in plan.calls[:5]] == [
        (9728, 896, 24),
        (896, 4864, 24),
        (1152, 896, 24),
        (896, 896, 24),
        (151936, 896, 1),
    ]
    attention = plan.calls[5:]
    assert all(s.batch == 14 for s, _ in attention) and {s.layout for s, _ in attention} == {"nn", "nt"}
    recorded = sum(s.calls or 0 for s in sizes.load().shapes if s.batch == 14)
    assert sum(count for _, count in attention) == round(
        sum(s.calls or 0 for s in sizes.load().shapes if s.layout == "nn" and s.batch == 14) / 95
    ) + round(sum(s.calls or 0 for s in sizes.load().shapes if s.layout == "nt" and s.batch == 14) / 95)
    unlisted = [g for g in plan.left_out if g.text == "matmul_alpha_beta_cache @ mlx"]
    assert recorded and len(unlisted) == len(plan.left_out) == 1
    assert (unlisted[0].calls, unlisted[0].total_ms) == (
        4560 - recorded,
        pytest.approx(723.39 - sum(s.total_ms or 0 for s in sizes.load().shapes if s.batch == 14)),
    )
    assert step.plan_of(sizes.load(), 2280).calls[0][1] == 1
    by_hand = step.plan_of(sizes.from_specs(["n=8 k=8 calls=3", "n=9 k=8 calls=1"]), None)
    assert [count for _, count in by_hand.calls] in ([3, 1],)
    assert step.in_order([(by_hand.calls[0][0], 3), (by_hand.calls[1][0], 1)]) == [0, 0, 1, 0]


def test_steps_written_by_hand_are_one_step() -> None:
    plan = step.plan_of(sizes.from_specs(["n=8 k=8 calls=24", "n=900 k=8 calls=2"]), None)
    assert sorted((s.n, c) for s, c in plan.calls) == [(8, 24), (900, 2)]
    assert [c for _, c in step.plan_of(sizes.from_specs(["n=8 k=8", "n=900 k=8"]), None).calls] == [1, 1], "without counts, one call each"


def test_without_a_profile_there_is_nothing_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["step", "--spec", "n=64 k=64 nt calls=2", *QUICK, *FEW]
    assert cli.main([*words, "--json", "step.json"]) == 0
    assert [p["name"] for p in json.loads(Path("step.json").read_text())["policies"]] == ["best", "tuned"]
    assert "recorded" not in capsys.readouterr().out
    assert cli.main([*words, "--choice", "recorded"]) == 2
    assert "--choice recorded: it runs no call of the step: the profile does not say what it ran on" in capsys.readouterr().err


@pytest.mark.needs("simdgroup_matrix")
def test_a_step_under_several_choices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Path("sizes.md").write_text(
        "Matmul shape backend summary:\n"
        "  op=matmul | batch=1 | m=1 | n=64 | k=64 | tA=0 | tB=1:\n    backend=mlx: count=30 | total=3.00ms | avg=0.1ms\n"
        "  op=matmul_bias_add | batch=1 | m=1 | n=96 | k=33 | tA=0 | tB=0 | bias=1:\n    backend=gemv: count=20 | total=2.00ms | avg=0.1ms\n"
        "  op=matmul | batch=1 | m=1 | n=500 | k=64 | tA=0 | tB=1:\n    backend=mlx: count=10 | total=4.00ms | avg=0.4ms\n"
        "  op=matmul | batch=1 | m=1 | n=? | k=64 | tA=? | tB=? | loader=q9 | n0=4 | n1=4:\n    backend=x: count=10 | total=1.00ms | avg=0.1ms\n"
    )
    choices = [word for name in ("recorded", "best", "tuned", "gemv_nt_vec4", "gemv/baseline") for word in ("--choice", name)]
    assert (
        cli.main(["step", "sizes.md", *choices, "--iters", "3", *QUICK, "--backends", "gemv,mlx,gemv_nt_vec4", "--json", "step.json"]) == 0
    )
    data, text = json.loads(Path("step.json").read_text()), capsys.readouterr().out
    assert data["steps"] == 10 and [c["calls"] for c in data["calls"]] == [3, 2, 1]
    by_name = {p["name"]: p for p in data["policies"]}
    assert [v.split("/")[0] for v in by_name["recorded"]["variants"]] == ["mlx", "gemv", "mlx"]
    assert [v and v.split("/")[0] for v in by_name["gemv_nt_vec4"]["variants"]] == ["gemv_nt_vec4", None, "gemv_nt_vec4"]
    assert by_name["gemv/baseline"]["variants"] == [None, "gemv/baseline", None] and by_name["gemv/baseline"]["calls"] == 2
    for p in data["policies"]:
        assert len(p["host_ms"]) == 3 and p["wrong"] == []
        sizes_of = [2 * (64 + 64 * 64 + 64), 2 * (33 + 33 * 96 + 96 + 96), 2 * (64 + 64 * 500 + 500)]
        assert p["bytes"] == sum(c * b for c, b, v in zip((3, 2, 1), sizes_of, p["variants"], strict=True) if v)
        if p["shares"][1] is not None:
            assert sum(s or 0 for s in p["shares"]) == pytest.approx(1)
    assert re.search(r"^shape .*\n.*\n.*  3   mlx/", text, re.MULTILINE), "names to the left, numbers to the right"
    assert "left out: op=matmul | batch=1 | m=1 | n=?" in text and "10.0% of the profile's matmul time" in text
    assert cli.main(["step", "sizes.md", "--choice", "best", "--results", "none.json"]) == 2
    assert cli.main(["step", "--spec", "m=3 n=4 k=4", "--choice", "gemv/baseline"]) == 2
    assert "--choice gemv/baseline: it runs no call of the step" in capsys.readouterr().err
    assert cli.main(["step", "sizes.md", "--choice", "nobody"]) == 2
    assert "no family 'nobody'" in capsys.readouterr().err
    assert cli.main(["step", "sizes.md", "--memory", "0.00001"]) == 2
    assert "--memory or --shapes changes that" in capsys.readouterr().err
    data["left_out"] = [{"text": "x", "why": "y", "calls": "<script>alert(1)</script>", "total_ms": 1.0, "columns": None}]
    data["policies"][0]["calls"] = "<script>alert(2)</script>"
    Path("poisoned.json").write_text(json.dumps(data))
    assert cli.main(["report", "poisoned.json", "-o", "poisoned.html"]) == 0
    page = Path("poisoned.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page


@pytest.mark.needs("simdgroup_matrix")
def test_each_call_of_a_step_has_weights_of_its_own(device: metalmm.Device) -> None:
    plan = step.plan_of(sizes.from_specs(["n=64 k=64 nt calls=5", "m=2 n=32 k=64 nn calls=2"]), None)
    weights = step._Weights(device, plan, 0)
    addresses = [w.device_address for calls in weights.calls for w in calls]
    assert len(set(addresses)) == 7
    policy = step.policy_of("gemm_tiled", plan, device, {})
    batch, order = step._record(device, plan, weights, policy)
    assert len(batch) == 7 and order == [0, 1, 0, 0, 0, 1, 0]
    with batch:
        pass
    assert not step._wrong(device, plan, weights, policy)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def a_page(tmp_path: Path) -> str:
    """Of two runs, one of them of another device, and a step, with everything long in it."""
    bench(*SMALL, "--spec", "m=1 n=64 k=65 nn batch=14 alpha=0.125 calls=24", *FEW, name="one.json")
    _, data = bench(*SMALL, *FEW, name="two.json")
    data["environment"].update(gpu="Apple M9 Ultra <Max> & Co", device="metal", note=None)
    data["shapes"][0]["results"][0].update(failed="a very_long_reason_without_a_space_" * 20)
    files.write_json("two.json", data)
    assert cli.main(["step", *SMALL, "--choice", "best", "--choice", "tuned", "--iters", "3", *FEW, *QUICK, "--json", "step.json"]) == 0
    assert cli.main(["report", "one.json", "two.json", "step.json", "-o", "page.html"]) == 0
    return Path("page.html").read_text()


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text = a_page(tmp_path)
    assert "http" not in re.sub(r"<title>.*?</title>", "", text) and "<script" not in text and "<link" not in text
    assert "Apple M9 Ultra &lt;Max&gt; &amp; Co" in text and "<Max>" not in text
    for word in (
        "The step: 26 matmuls",
        "Winners",
        "Variants by shape: one",
        "Wrong or failed: two",
        "prefers-color-scheme: dark",
        "m1_optimized",
    ):
        assert word in text, word


def test_a_call_has_one_colour_under_every_policy() -> None:
    policies = [{"shares": [0.5, 0.3, 0.1, 0.05, 0.03, 0.01, 0.01]}, {"shares": [0.01, 0.3, 0.2, 0.4, 0.05, 0.03, None]}]
    colours = page_html._colours(policies)
    assert colours == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}
    calls = [{"shape": sizes.from_specs([f"n={8 * i + 8} k=8"]).shapes[0].as_json()} for i in range(7)]
    for policy in policies:
        parts = page_html._parts({"calls": calls}, {**policy, "variants": ["a/b"] * 7}, colours)
        assert [colour for _, _, colour in parts] == [0, 1, 2, 3, 4, 5] and parts[-1][0] == "the others"


def test_a_slow_variant_flattens_no_bar() -> None:
    m = statistics.Median(100.0, 90.0, 110.0, 5)
    assert 'class="track cut"' in page_html._bar("slow", m, "100", 4.0, False)
    assert 'class="track"' in page_html._bar("fast", statistics.Median(1.0, 0.9, 1.1, 5), "1", 4.0, True)


@pytest.mark.rest
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (Debian: chromium); the page's layout was NOT tested")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """No horizontal scroll, not of a table either, and nothing that is cut off, wide and narrow."""
    text = a_page(tmp_path)
    frames = "".join(
        f'<iframe id="w{w}" style="width:{w}px;height:900px;border:0" srcdoc="{page_html.escape(text)}"></iframe>' for w in (1280, 390)
    )
    script = """<script>onload = () => { for (const f of document.querySelectorAll('iframe')) { const d = f.contentDocument, r = d.documentElement;
      const wide = [...d.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > r.clientWidth + 0.5);
      document.body.append(`${f.id}: ${r.scrollWidth} of ${r.clientWidth}, ${wide.length} stick out ${wide.slice(0, 3).map(e => e.className)}, h1 ${d.querySelectorAll('h1').length};`); } }</script>"""
    Path("frames.html").write_text(f"<!doctype html><meta charset=utf-8><body>{frames}{script}</body>")
    assert CHROMIUM
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1800,1000", f"--user-data-dir={tmp_path}/chromium", "--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path}/frames.html"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    for width in (1280, 390):
        found = re.search(rf"w{width}: (\d+) of (\d+), (\d+) stick out (\S*), h1 (\d)", done.stdout)
        assert found, done.stderr[-2000:]
        assert (int(found[1]), int(found[3]), found[5]) == (int(found[2]), 0, "1"), found[0]
