"""Code that launches an exported kernel: Swift, Rust (objc2-metal), a C header and PyTorch. Written of its description alone.

MLX is left out: mx.fast.metal_kernel writes a kernel's parameters itself, and ours have theirs.
"""

from __future__ import annotations

from typing import Any


def texts(told: dict[str, Any], name: str) -> dict[str, str]:
    """By the end of a file's name."""
    return {".swift": _swift(told, name), ".rs": _rust(told, name), ".h": _c(told, name), "_torch.py": _torch(told, name)}


def _operands(told: dict[str, Any]) -> list[str]:
    """Their names, in the order of the buffers."""
    return [b["name"] for b in told["buffers"] if "name" in b]


def _at(told: dict[str, Any]) -> list[tuple[int, str]]:
    """Which operand is at each index."""
    return [(b["index"], b.get("name") or b["bind"]) for b in told["buffers"]]


def _fields(told: dict[str, Any], number: str, whole: str) -> list[str]:
    """The values of the parameters, each in a language's words for one that is a float or a formula."""
    return [(number if f["type"] == "float" else whole).format(f["value"]) for f in told["params"]["fields"]]


def _notes(told: dict[str, Any], mark: str) -> str:
    lines = [f"{told['variant']}: {told['operation']}. Written by metalmm {told['metalmm']}."]
    lines += [
        f"{b['name']}: {b['elements']} of {b['type']}, {b['shape']}{', the result' if b.get('written') else ''}"
        for b in told["buffers"]
        if "name" in b
    ]
    lines += [f"weights: {told['weights']}", told["limits"]["alignment"], told["limits"]["sizes"], f"math: {told['math']}"]
    return "".join(f"{mark} {line}\n" for line in lines)


def _language(told: dict[str, Any]) -> str:
    """As 3_1."""
    return str(told["language"]).removeprefix("Metal ").replace(".", "_")


def _swift(told: dict[str, Any], name: str) -> str:
    sizes = ", ".join(f"{s}: Int" for s in told["sizes"])
    fields = ",\n    ".join(_fields(told, "Float({}).bitPattern", "UInt32({})"))
    operands = ", ".join(f"{o}: MTLBuffer" for o in _operands(told))
    binds = "\n  ".join(f"encoder.setBuffer({o}, offset: 0, index: {i})" for i, o in _at(told))
    gx, gy, gz = told["grid"]
    return f"""{_notes(told, "//")}import Foundation
import Metal

enum {name} {{
static func makePipeline(_ device: MTLDevice, source: String) throws -> MTLComputePipelineState {{
  let options = MTLCompileOptions()
  options.languageVersion = .version{_language(told)}
  if #available(macOS 15.0, iOS 18.0, *) {{
    options.mathMode = .safe
    options.mathFloatingPointFunctions = .precise
  }} else {{
    options.fastMathEnabled = false
  }}
  let library = try device.makeLibrary(source: source, options: options)  // the text of {told["source"]}
  guard let function = library.makeFunction(name: "{told["function"]}") else {{ throw CocoaError(.featureUnsupported) }}
  return try device.makeComputePipelineState(function: function)
}}

static func encode(_ encoder: MTLComputeCommandEncoder, _ pipeline: MTLComputePipelineState, {sizes}, {operands}) {{
  let params: [UInt32] = [
    {fields},
  ]
  encoder.setComputePipelineState(pipeline)
  {binds}
  encoder.setBytes(params, length: {told["params"]["bytes"]}, index: {told["params"]["index"]})
  encoder.dispatchThreadgroups(
    MTLSize(width: {gx}, height: {gy}, depth: {gz}), threadsPerThreadgroup: MTLSize(width: {told["threads"][0]}, height: 1, depth: 1))
}}
}}
"""


def _rust(told: dict[str, Any], name: str) -> str:
    sizes = ", ".join(f"{s}: usize" for s in told["sizes"])
    fields = ",\n        ".join(_fields(told, "({}f32).to_bits()", "({}) as u32"))
    operands = ", ".join(f"{o}: &ProtocolObject<dyn MTLBuffer>" for o in _operands(told))
    binds = "\n        ".join(f"encoder.setBuffer_offset_atIndex(Some({o}), 0, {i});" for i, o in _at(told))
    gx, gy, gz = told["grid"]
    return f"""{_notes(told, "//")}use objc2::{{rc::Retained, runtime::ProtocolObject}};
use objc2_foundation::{{ns_string, NSString}};
use objc2_metal::*;
use std::ptr::NonNull;

pub const SOURCE: &str = include_str!("{told["source"]}");

pub fn make_pipeline(device: &ProtocolObject<dyn MTLDevice>) -> Option<Retained<ProtocolObject<dyn MTLComputePipelineState>>> {{
    let options = MTLCompileOptions::new();
    options.setLanguageVersion(MTLLanguageVersion::Version{_language(told)});
    #[allow(deprecated)] // mathMode is of macOS 15
    options.setFastMathEnabled(false);
    let library = device.newLibraryWithSource_options_error(&NSString::from_str(SOURCE), Some(&options)).ok()?;
    let function = library.newFunctionWithName(ns_string!("{told["function"]}"))?;
    device.newComputePipelineStateWithFunction_error(&function).ok()
}}

#[allow(clippy::too_many_arguments)]
pub fn encode(encoder: &ProtocolObject<dyn MTLComputeCommandEncoder>, pipeline: &ProtocolObject<dyn MTLComputePipelineState>, {sizes}, {operands}) {{
    let params: [u32; {told["params"]["bytes"] // 4}] = [
        {fields},
    ];
    encoder.setComputePipelineState(pipeline);
    unsafe {{
        {binds}
        encoder.setBytes_length_atIndex(NonNull::from(&params).cast(), {told["params"]["bytes"]}, {told["params"]["index"]});
    }}
    encoder.dispatchThreadgroups_threadsPerThreadgroup(
        MTLSize {{ width: {gx}, height: {gy}, depth: {gz} }},
        MTLSize {{ width: {told["threads"][0]}, height: 1, depth: 1 }},
    );
}}
"""


def _c(told: dict[str, Any], name: str) -> str:
    guard = "".join(c if c.isalnum() else "_" for c in name)
    sizes = ", ".join(f"uint32_t {s}" for s in told["sizes"])
    unused = "".join(f" (void){s};" for s in told["sizes"])
    members = "".join(
        f"  {'float' if f['type'] == 'float' else 'uint32_t'} f{i}_{f['name']};\n" for i, f in enumerate(told["params"]["fields"])
    )
    values = ", ".join(_fields(told, "{}f", "{}"))
    at = "".join(f'  {{{i}, "{o}"}},\n' for i, o in _at(told))
    grid = ", ".join(told["grid"])
    return f"""{_notes(told, "//")}#ifndef {guard.upper()}_H
#define {guard.upper()}_H
#include <stdint.h>

#define {guard}_SOURCE "{told["source"]}"
#define {guard}_FUNCTION "{told["function"]}"
#define {guard}_THREADS {told["threads"][0]}
#define {guard}_PARAMS_INDEX {told["params"]["index"]}

static const struct {{ uint32_t index; const char* operand; }} {guard}_buffers[] = {{
{at}}};

typedef struct {{
{members}}} {guard}_Params;

static inline {guard}_Params {guard}_params({sizes}) {{
 {unused}
  {guard}_Params p = {{{values}}};
  return p;
}}

// Threadgroups.
static inline void {guard}_grid({sizes}, uint32_t groups[3]) {{
 {unused}
  const uint32_t all[3] = {{{grid}}};
  for (int i = 0; i < 3; i++) groups[i] = all[i];
}}
#endif
"""


def _torch(told: dict[str, Any], name: str) -> str:
    sizes, operands = ", ".join(told["sizes"]), ", ".join(_operands(told))
    at = {**dict(_at(told)), told["params"]["index"]: "params"}
    bound = [at.get(i, "a") for i in range(max(at) + 1)]  # torch binds by position; an index that no parameter has is not read
    fields = ",\n        ".join(_fields(told, "struct.unpack('i', struct.pack('f', {}))[0]", "{}")).replace("/", "//")
    gx, gy, gz = (g.replace("/", "//") for g in told["grid"])
    return f'''{_notes(told, "#")}import struct
from pathlib import Path

import torch

# torch has no option for the mode of math.
LIBRARY = torch.mps.compile_shader(Path(__file__).with_name("{told["source"]}").read_text())


def launch({sizes}, {operands}):
    """Tensors on device mps; the result is written in place."""
    params = torch.tensor([
        {fields},
    ], dtype=torch.int32, device="mps")
    threads = (({gx}) * {told["threads"][0]}, {gy}, {gz})
    LIBRARY.{told["function"]}({", ".join(bound)}, threads=threads, group_size=({told["threads"][0]}, 1, 1))
'''
