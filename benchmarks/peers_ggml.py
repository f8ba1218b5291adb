#!/usr/bin/env python3
"""On an NVIDIA GPU: ggml's matmuls with quantized weights, to set beside rows_cuda.py's numbers; times are the GPU's.

ggml_rows.cpp runs ggml_mul_mat in CUDA graphs, over copies of the weights that together are past the second-level cache. A is float32,
as ggml has it; each call includes its rounding to 8 bits. Each time is the median of 9 samples. Of each result 24 elements are checked
against float64. A wrong one ends the run. `GB/s` counts the weights alone.

    python benchmarks/peers_ggml.py --ggml DIR [--build DIR] [--types q8_0,q4_0] [--shapes 4096x4096,9728x896] [--m 1,4,16] [--json FILE]
    python benchmarks/peers_ggml.py --binary FILE [...]

--ggml is a checkout of ggml or llama.cpp. Its first build takes about 20 minutes on two cores. CMake's own variables apply: CUDACXX,
CUDAARCHS (default 90a-real), CMAKE_BUILD_PARALLEL_LEVEL. --binary is a driver built before; cuBLAS must be on LD_LIBRARY_PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_CPU": "OFF",
    "GGML_CUDA": "ON",
    "GGML_CUDA_FA": "OFF",
    "GGML_CUDA_GRAPHS": "ON",
    "GGML_CUDA_NCCL": "OFF",
    "GGML_CUDA_NO_VMM": "ON",
    "GGML_NATIVE": "OFF",
    "GGML_OPENMP": "OFF",
}
# Without flash attention its instances are empty but slow to compile: they are left out. Nothing that is linked asks for them.
PROJECT = """cmake_minimum_required(VERSION 3.24)
project(ggml_rows LANGUAGES C CXX CUDA)
find_package(CUDAToolkit REQUIRED)
add_subdirectory(${GGML_DIR} ggml)
get_target_property(sources ggml-cuda SOURCES)
list(FILTER sources EXCLUDE REGEX "template-instances/fattn-")
set_property(TARGET ggml-cuda PROPERTY SOURCES ${sources})
get_target_property(libraries ggml-cuda INTERFACE_LINK_LIBRARIES)
string(REPLACE "CUDA::cudart" "CUDA::cudart_static" libraries "${libraries}")
set_property(TARGET ggml-cuda PROPERTY INTERFACE_LINK_LIBRARIES ${libraries})
add_executable(ggml_rows ${DRIVER})
target_compile_features(ggml_rows PRIVATE cxx_std_17)
target_link_libraries(ggml_rows PRIVATE ggml-cuda ggml-base)
target_link_options(ggml_rows PRIVATE -s)
"""


def built(checkout: Path, build: Path) -> Path:
    ggml = next((d for d in (checkout / "ggml", checkout) if (d / "src" / "ggml-cuda").is_dir()), None)
    if ggml is None:
        raise SystemExit(f"{checkout} is no checkout of ggml or llama.cpp: it has no src/ggml-cuda")
    build.mkdir(parents=True, exist_ok=True)
    project = build / "CMakeLists.txt"
    if not project.exists() or project.read_text() != PROJECT:
        project.write_text(PROJECT)
    options = OPTIONS | {"GGML_DIR": str(ggml.resolve()), "DRIVER": str(Path(__file__).resolve().with_name("ggml_rows.cpp"))}
    options["CMAKE_CUDA_ARCHITECTURES"] = os.environ.get("CUDAARCHS", "90a-real")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = ["cmake", *generator, "-S", str(build), "-B", str(build), *(f"-D{name}={value}" for name, value in options.items())]
    for command in (configure, ["cmake", "--build", str(build), "--target", "ggml_rows"]):
        if subprocess.run(command).returncode:
            raise SystemExit(f"failed: {' '.join(command)}")
    return build / "ggml_rows"


def measured(binary: Path, types: list[str], shapes: list[tuple[str, str]], rows: str) -> list[dict[str, Any]]:
    arguments = [word for t in types for n, k in shapes for word in (t, n, k, rows)]
    found = []
    print(f"{'type':8}{'m':>6}{'n':>8}{'k':>8}{'us':>10}{'GB/s':>8}")
    with subprocess.Popen([binary.resolve(), *arguments], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout
        for line in driver.stdout:
            row = json.loads(line)
            found.append(row)
            rate = row["bytes"] / row["us"] / 1e3
            print(f"{row['type']:8}{row['m']:6}{row['n']:8}{row['k']:8}{row['us']:10.2f}{rate:8.0f}", flush=True)
    if driver.returncode:
        raise SystemExit(f"{binary} failed: {driver.returncode}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--ggml", type=Path, metavar="DIR")
    source.add_argument("--binary", type=Path, metavar="FILE", help="a driver that is built")
    parser.add_argument("--build", type=Path, default=Path("build/ggml"), metavar="DIR")
    parser.add_argument("--types", default="q8_0,q4_0")
    parser.add_argument("--shapes", default="4096x4096,2048x8192,9728x896,896x4864")
    parser.add_argument("--m", default="1,2,4,8,16,32,64,128,512,2048")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shapes = [(n, k) for n, k in (shape.split("x") for shape in args.shapes.split(","))]
    found = measured(args.binary or built(args.ggml, args.build), args.types.split(","), shapes, args.m)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
