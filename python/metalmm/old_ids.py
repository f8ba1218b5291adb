"""Ids that variants had while they said what B is, too: what files of that time mean by them."""

from __future__ import annotations

import re
from functools import cache

# In their order; the first that fits. A rule's last part is a point of a strategy, but for parameters at their default.
_RULES = [
    (r"m1_optimized_v6/nt_simd_(.+)", r"gemv_nt_vec4/\1"),
    (r"m1_optimized_v6/nt_wide_(.+)", r"gemv_nt_thread/\1"),
    (r"m1_optimized_v6/nn_wide_w32_(.+)", r"gemv_nn_thread/q2_\1"),
    (r"m1_optimized_v6/nn_(.+)", r"gemv_nn/\1"),
    (r"m1_optimized_v6/nt_(bn\d+)_col_(bk\d+)_(tg\d+)", r"gemv_columns/\1_\2_vec4_\3"),
    (r"m1_optimized_v7/nt_octet_(.+)", r"gemv_nt_octet/\1"),
    (r"m1_optimized_v7/nt_(.+)", r"gemv_nt/\1"),
    (r"m1_optimized_v7/nn_octet_(.+)", r"gemv_nn_octet/\1"),
    (r"small_m/nt_octet_(r\d)_(.+)", r"gemv_nt_octet/\1_\2"),
    (r"small_m/nt_tiles_(.+)", r"small_m/\1"),
    (r"small_m/nt_(r.+)", r"gemv_nt/\1"),
    (r"small_m/nt_(.+)", r"gemv_nt_vec4/r8_\1"),
    (r"small_m/nn_(.+)", r"gemv_nn/r8_\1"),
    (r"(?:q8|q4|affine)/.*_gemm_(.+)", r"gemm/\1"),
    (r"(?:q8|q4|affine)/.*_tiles_mma_(.+)", r"small_m_mma/\1"),
    (r"(?:q8|q4|affine)/.*_tiles_(.+)", r"small_m/\1"),
    (r"(?:q8|q4|affine|fused)/.*_mma_l4_(.+)_x_(tg\d+)", r"gemv_nt_mma/\1_\2"),
    (r"(?:q8|q4|affine|fused)/.*_wide_(.+)", r"gemv_nt_thread/\1"),
    (r"(?:q8|q4|affine|fused)/.*?_((?:r\d_)?l\d.+)", r"gemv_nt/\1"),
]
# Parts that are left out today, by strategy.
_DEFAULTS = {
    **dict.fromkeys(("gemv_nt", "gemv_nt_mma", "gemv_nt_octet"), ("c1", "s1", "d1")),
    "gemv_nn_octet": ("d1",),
    "gemv_nt_vec4": ("s1",),
    **dict.fromkeys(("small_m", "small_m_mma"), ("s1", "d1")),
}
_PARTS = re.compile(r"(?:[a-z]+\d+|x)(?:_(?:[a-z]+\d+|x))*")


@cache
def new_id(old: str) -> str:
    """What a variant of that id is called now; empty where that was never one, or has none."""
    if len(old) > 100 or "_turns_" in old:
        return ""
    found = next(((m, new) for pattern, new in _RULES if (m := re.fullmatch(pattern, old))), None)
    if found is None:
        return ""
    family, _, name = found[0].expand(found[1]).partition("/")
    name = "_".join(word for word in name.split("_") if word not in _DEFAULTS.get(family, ()))
    return f"{family}/{name}" if _PARTS.fullmatch(name) else ""
