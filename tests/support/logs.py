"""Profile logs for tests: events as the user's application writes them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

BLOCK = "Generation Loop/block_{0}/mlp_swiglu_block_{0}_op/Generation Loop/block_{0}/mlp_swiglu_block_{0}_op"
MATMULS = [
    {"op": "matmul", "backend": "gemv", "batch": "1", "m": "1", "n": "896", "k": "4864", "tA": "0", "tB": "1"},
    {"op": "matmul", "backend": "gemv_q8_fused2", "batch": "1", "m": "1", "k": "896", "n0": "4864", "n1": "4864"},
    {
        "op": "matmul_cache",
        "backend": "mps",
        "batch": "1",
        "m": "1",
        "n": "9728",
        "k": "896",
        "tA": "0",
        "tB": "1",
        "strided_batch": "false",
    },
    {"op": "matmul_bias_add", "backend": "mlx", "batch": "1", "m": "1", "n": "1152", "k": "896", "tA": "0", "tB": "0", "bias": "1"},
    {"op": "matmul", "backend": "mlx", "batch": "1", "m": "1", "n": "151936", "k": "896", "tA": "0", "tB": "0", "loader": "q8nk_split"},
    {
        "strided_batch": "true",
        "op": "matmul_alpha_beta_cache",
        "loader": "dense",
        "backend": "mlx",
        "cache": "1",
        "m": "1",
        "beta": "0.0",
        "alpha": "0.125",
        "accumulate": "1",
        "n": "69",
        "k": "64",
    },
    {"op": "softmax", "rows": "14"},
]


def event(kind: str, **data: Any) -> dict[str, Any]:
    return {
        "timestamp": "2025-11-04T10:00:00.1Z",
        "span_id": None,
        "parent_span_id": None,
        "span_name": None,
        "event": {"type": kind, "data": data},
    }


def drawn_events(seed: int, count: int = 800) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    found = []
    for i in range(count):
        us, block = draw.choice([0, 1, draw.randrange(2000), draw.randrange(200_000)]), draw.randrange(24)
        kind = draw.randrange(12)
        if kind == 0:
            name = draw.choice(
                ["iteration_total", f"block_{block}_total", f"forward_cpu_block_{block}", "next_token_wait", "x_cb_wait", "gpu_sync", "eos"]
            )
            found.append(
                event(
                    "InternalKernelCompleted", parent_op_name=draw.choice(["loop", "sampling"]), internal_kernel_name=name, duration_us=us
                )
            )
        elif kind == 1:
            found.append(
                event(
                    "KernelBackendSelected",
                    op_name=draw.choice(["sdpa", "mlp"]),
                    backend=draw.choice(["legacy", "new"]),
                    reason="default_auto",
                )
            )
        elif kind == 2:
            found.append(event(draw.choice(["HostMemory", "ResourceCacheAccess", "NewThing"]), bytes=i))
        elif kind < 7:
            pairs = draw.choice(MATMULS)
            found.append(
                event(
                    "GpuOpCompleted",
                    op_name=f"{BLOCK.format(block)}/matmul/{pairs.get('backend', 'x')} (Q)",
                    backend="b",
                    duration_us=us,
                    data=pairs,
                )
            )
        elif kind == 7:
            path = "/".join(f"{k}={v}" for k, v in MATMULS[draw.randrange(4)].items())
            ending = draw.choice(["", f"#{draw.randrange(3)}", "/metallic::kernels::X/after=1"])
            found.append(event("GpuOpCompleted", op_name=f"Loop/matmul/{path}{ending}", backend="b", duration_us=us))
        else:
            name = draw.choice(
                [
                    "Loop/cb_wait",
                    f"{BLOCK.format(block)}/cb_gpu",
                    "Unscoped/cb_gpu_wait",
                    "a_wait",
                    f"x/sdpa_block_{block}_op",
                    f"x/mlp_swiglu_block_{block}_op",
                    "metallic::kernels::rope::RoPEOp",
                    f"x/attn_rearrange_block_{block}_op",
                    "tensor_sync",
                    f"x/forward_cpu_block_{block}",
                ]
            )
            found.append(event("GpuOpCompleted", op_name=name, backend="b", **({} if draw.randrange(9) == 0 else {"duration_us": us})))
    return found


# -- the long way: lists of samples, numpy's quantiles -----------------------------------------------------------------


def written(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(e) + "\n" for e in events))
    return path
