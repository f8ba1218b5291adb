"""Turns one kernel of a preprocessed MSL file into C++ for the CPU device.

MSL is C++ with address spaces, attributes and threadgroup variables; everything else is supplied by csrc/msl/runtime. Tokens are
edited, and every line stays where it was, so that a compiler's message points into the .metal file. What is not understood is
refused: a missed ``threadgroup`` would silently become a variable of each thread.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence

from .. import for_gcc, for_nvrtc, undecided
from ..control_flow import ControlFlow
from ..passes import Passes
from ..program import Declaration, Instance, Program
from ..program_scope import parsed
from ..rules import LANES, POSITIONS, UNSIGNED, MetalRules
from ..tokens import NUMBERS, OPEN, VECTORS

_ALIASES = {
    "thread_execution_width": "threads_per_simdgroup",
    "grid_size": "threads_per_grid",
}
_POSITIONS = (POSITIONS | LANES) - set(_ALIASES)
_UNSUPPORTED = re.compile(
    r"(?:texture(?:1d|2d|3d|cube|_buffer)\w*|depth(?:2d|cube)\w*|sampler|imageblock\w*|visible_function_table|"
    r"intersection_function_table|intersector|acceleration_structure|instance_acceleration_structure|command_buffer|"
    r"render_command|compute_command|tensor_handle|cooperative_tensor|simdgroup_event|simdgroup_async_copy|"
    r"threadgroup_imageblock|ray_data|object_data|double)"
)
PLAIN = "constexpr "  # before the place of what a compiler wants more of, or less
_RARE_SWIZZLE = re.compile(r"([xyzw]{3,4}|[rgba]{2,4})\b")  # other than a pair of xyzw; a pass may have put more behind it
_POSITION_TYPES = UNSIGNED | {"ushort2", "ushort3", "uint2", "uint3"}
_NUMBER_TYPES = {*_POSITION_TYPES, *NUMBERS, *VECTORS, "unsigned", "signed", "size_t", "int32_t", "int64_t", "uint64_t"}


class CpuTarget:
    """A program on its way to C++."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.source = program.source
        self.passes = Passes(program)

    def lower(
        self,
        kernels: Sequence[str],
        constants: Mapping[int | str, bool | int | float] | None,
        compiler: str,
        *,
        stops: bool,
        converged: bool,
        choose: Collection[str],
    ) -> dict[str, str]:
        """C++ for the first of these kernels and for those that are instances of the same template, by name.

        stops: loops look whether they shall. converged: see `lower`. choose: see undecided.py."""
        instances = {kernel: self.program.instance(kernel) for kernel in kernels}
        definition = self.program.definition_of(instances[kernels[0]])
        instances = {kernel: one for kernel, one in instances.items() if self.program.definition_of(one) is definition}
        reachable = self.program.reachable(definition, *(one.declaration for one in instances.values()))
        self._refuse_unsupported(reachable)
        MetalRules(self.program).check(reachable)
        specs = self._argument_specs(definition)
        limits = {kernel: self._thread_limit(definition, one.declaration) for kernel, one in instances.items()}
        self.passes.function_constants(constants or {}, reachable)
        template = self._template_header(definition)
        parameters = ", ".join(self.passes.erased_text(span) for span in self.program.parameters(definition))
        entries = {kernel: self._entry(definition, one, limits[kernel], specs, template, parameters) for kernel, one in instances.items()}
        self.passes.drop_unsupported(reachable, _UNSUPPORTED)
        self.passes.drop_other_kernels(definition)
        if plain := {place.removeprefix(PLAIN) for place in choose if place.startswith(PLAIN)}:
            if compiler == "gcc":
                for_gcc.plain_functions(self.program, plain)
            else:
                for_nvrtc.constant_constants(self.program)
        self.passes.attributes()
        if compiler == "gcc":
            for_gcc.member_specializations(self.program)
            for_gcc.conversions(self.program)
        if compiler == "nvrtc":
            for_nvrtc.library_specializations(self.program)
            for_nvrtc.statement_expressions(self.program)
            for_nvrtc.compound_literals(self.source)
            if not converged:
                for_nvrtc.words_of_members(self.source)
        self.passes.constant_vectors(compiler)
        self.passes.vector_widths()
        self.passes.members_and_duplicates()
        self._threadgroup_variables()
        constant_conditions = [] if converged else self.passes.constant_conditions()
        self.passes.address_spaces()
        self.passes.swizzles()
        self.passes.literals()
        self.passes.pragmas(compiler)
        if choose:
            undecided.undecided_calls(self.program, choose, compiler)
            undecided.conditionals(self.program, choose)
        if compiler != "clang":  # g++ may stand behind the tests' fake of NVRTC
            for_gcc.indexed_conditionals(self.program)
        self.passes.range_designators()
        flow = ControlFlow(self.program, constant_conditions)
        may_skip = masks = False
        if compiler == "nvrtc" and not converged:
            may_skip = flow.may_skip(reachable)
            masks = flow.masks(reachable, may_skip, stops)
            if not masks:
                flow.joins(reachable, may_skip)
        if stops:  # on NVIDIA's GPUs alone
            flow.stops()
        elif not converged:  # a processor's lanes need no count; those of the tests' fake of it do
            flow.turns(reachable)
        flow.place_masks()
        for i in constant_conditions:
            if self.source.tokens[i].text == "if":
                self.source.tokens[i].text = "if constexpr "
        asked = "#define METALMM_SKIPPED_BARRIERS 1\n" * may_skip + "#define METALMM_MASKS 1\n" * masks
        body = asked + self._wanted() + '#include "msl.h"\n' + self.source.text().rstrip() + '\n# 1 "<metalmm entry>"\n'
        return {kernel: body + entry for kernel, entry in entries.items()}

    def _refuse_unsupported(self, declarations: list[Declaration]) -> None:
        for d in declarations:
            for i in range(d.start, d.end):
                token = self.source.tokens[i]
                if token.kind == "name" and _UNSUPPORTED.fullmatch(token.text) and self.source.tokens[i - 1].text not in (".", "->"):
                    raise self.source.fail(i, f"'{token.text}' is not supported on the CPU device")

    def _argument_specs(self, kernel: Declaration) -> list[str]:
        """An abi::ArgSpec for every parameter, in C++."""
        found = [self._parameter(kernel, first, last) for first, last in self.program.parameters(kernel)]
        taken: dict[tuple[str, int], str] = {}
        for kind, index, enabled in found:
            if index is None or kind not in ("buffer", "threadgroup"):
                continue
            # Two that function constants switch can take turns.
            if (kind, index) in taken and "true" in (enabled, taken[kind, index]):
                raise self.source.fail(kernel.start, f"two arguments of kernel '{kernel.name}' at {kind} index {index}")
            taken[kind, index] = enabled
        used = {kind: {index for k, index, _ in found if k == kind and index is not None} for kind in ("buffer", "threadgroup")}
        specs = []
        for kind, index, enabled in found:
            if kind in used and index is None:
                index = next(i for i in range(32) if i not in used[kind])
                used[kind].add(index)
            if kind in used and not 0 <= int(index or 0) < 31:
                raise self.source.fail(kernel.start, f"{kind} index {index} is not in 0 to 30")
            specs.append(f"{{::metalmm::abi::ArgKind::{kind}, {index or 0}, {enabled}}}")
        return specs

    def _parameter(self, kernel: Declaration, first: int, last: int) -> tuple[str, int | None, str]:
        tokens, parameter = self.source.tokens, self.program.parameter(first, last)
        attributes = parameter.attributes
        enabled = "true"
        if "function_constant" in attributes:
            enabled = "static_cast<bool>(" + self.program.join(attributes.pop("function_constant")) + ")"
        for name, argument in attributes.items():
            if name in ("buffer", "threadgroup"):
                return name, self.program.integer(argument, kernel.namespace), enabled
            if (position := _ALIASES.get(name, name)) in _POSITIONS:
                self._check_position(position, first, last)
                return position, None, enabled
            if name not in ("maybe_unused", "unused"):
                raise self.source.fail(first, f"the attribute [[{name}]] of a kernel argument is not supported on the CPU device")
        if not parameter.is_memory:
            words = " ".join(t.text for t in tokens[first:last])
            what = "has no attribute and is neither pointer nor reference; of a struct of buffers each is an argument of its own here"
            raise self.source.fail(first, f"the kernel argument '{words}' {what}")
        return ("threadgroup" if parameter.is_threadgroup else "buffer"), None, enabled

    def _check_position(self, position: str, first: int, last: int) -> None:
        """Positions are ushort or uint, of one to three dimensions; indices of one."""
        tokens = self.source.tokens[first:last]
        head = next((j for j in range(len(tokens) - 1) if tokens[j].text == "[" and tokens[j + 1].text == "["), len(tokens))
        if any(t.text in ("*", "&") for t in tokens[:head]):
            raise self.source.fail(first, f"[[{position}]] is a value; it takes no pointer or reference")
        words = [t.text for t in tokens[:head] if t.text in _NUMBER_TYPES]
        kind = " ".join(words)
        if "unsigned" in words and set(words) <= {"unsigned", "int", "short"}:
            kind = "uint"
        if not kind:
            return  # by another name, which a type checker would have to look up
        allowed = UNSIGNED if position.startswith("thread_index") or "simdgroup" in position or "quadgroup" in position else _POSITION_TYPES
        if kind not in allowed:
            takes = "ushort or uint" if allowed is UNSIGNED else "ushort or uint, or a vector of two or three of them"
            raise self.source.fail(first, f"[[{position}]] is of type {kind}; it takes {takes}")

    def _thread_limit(self, *declarations: Declaration) -> str:
        for d in reversed(declarations):
            for a in d.attributes:
                if span := a.names.get("max_total_threads_per_threadgroup"):
                    return self.program.join(span)
        return "0"

    def _template_header(self, d: Declaration) -> str:
        if self.source.tokens[d.start].text != "template":
            return ""
        end = self.source.angle_end(d.start + 1)
        return " ".join(t.text for t in self.source.tokens[d.start : end + 1])

    def _threadgroup_variables(self) -> None:
        for i, token in enumerate(self.source.tokens):
            if token.text != "threadgroup" or token.kind != "name":
                continue
            if not self.source.starts_declaration(i):
                self._check_threadgroup_use(i)
                continue
            self._declare_threadgroup(i)

    def _check_threadgroup_use(self, i: int) -> None:
        """Elsewhere `threadgroup` qualifies what a pointer or reference points to, or a member function."""
        tokens, j = self.source.tokens, i + 1
        before, last = tokens[self.source.previous(i) or 0], tokens[i]
        if before.text in (")", "*", "&") or tokens[j].text in ("*", "&", "&&"):
            return
        two_before = self.source.previous(self.source.previous(i) or 0)
        if before.text == "<" and two_before is not None and tokens[two_before].text == "tensor":
            return
        if before.text == "const" and two_before is not None and tokens[two_before].text == ")":
            return  # f() const threadgroup
        while tokens[j].kind == "name" or tokens[j].text in ("::", ""):
            last, j = tokens[j], j + 1
            if tokens[j].text == "<":
                j = self.source.angle_end(j) + 1
        outer = tokens[two_before] if before.text == "const" and two_before is not None else before
        is_parameter = (outer.text in ("(", ",") and tokens[j].text in ("[", "(")) or (outer.text == "<" and tokens[j].text == "(")
        if tokens[j].text in ("*", "&", "&&") or is_parameter or (before.text == "const" and last.text == "const"):
            return
        raise self.source.fail(i, "'threadgroup' in a position that the CPU device does not understand")

    def _declare_threadgroup(self, i: int) -> None:
        """Lowers `threadgroup T a[n], b;` at index i, and leaves a pointer or reference to such memory alone."""
        tokens = self.source.tokens
        end = i
        while tokens[end].text != ";":
            if tokens[end].text == "{" and self.program.opens_function(i, end):
                return  # what a function returns
            end = self.source.matching(end) + 1 if tokens[end].text in OPEN else end + 1
        j = i + 1
        while tokens[j].text in ("const", "volatile", "") or tokens[j].text in ("__attribute__", "alignas"):
            j = self.source.matching(j + 1) + 1 if tokens[j].text in ("__attribute__", "alignas") else j + 1
        type_start = j
        while True:  # ns::name<…>::name, or several words such as `unsigned int`
            if tokens[j].text == "<":
                j = self.source.angle_end(j) + 1
            elif tokens[j].text in ("::", "typename") or (tokens[j].kind == "name" and tokens[j + 1].text not in ("[", ";", ",", "=", "{")):
                j += 1
            else:
                break
        if tokens[j].text in ("*", "&", "&&", "(", ">"):
            return
        if tokens[j].kind != "name" or j == type_start:
            raise self.source.fail(i, "'threadgroup' in a declaration that the CPU device does not understand")
        kind = self.program.join((type_start, j))
        lines = []
        for first, last in self.source.split(j, end):
            name = tokens[first].text
            equals = next((j for j in range(first, last) if tokens[j].text in ("=", "{")), last)
            dimensions = self.program.join((first + 1, equals))
            alias = f"metalmm_tg_{i}_{first}"
            lines.append(
                f"typedef {kind} {alias} {dimensions}; {alias}& {name} = ::metalmm::msl::threadgroup_variable<METALMM_UNIT, {first}, {alias}>();"
            )
            if equals < last:  # every thread writes it where it comes by
                value = self.passes.erased_text((equals, last))
                lines.append(f"{{ {alias} metalmm_value {value}; __builtin_memcpy(&{name}, &metalmm_value, sizeof({name})); }}")
        before = self.source.before_specifiers(i)
        self.source.blank(0 if before is None else before + 1, i)  # every place has 16 bytes' alignment
        self.source.blank(i, end + 1)
        tokens[i].text = " ".join(lines)

    def _wanted(self) -> str:
        """What of the runtime's headers few programs ask for, in C++. C++'s own helpers stand in metal:: only for those: another may have a
        global `move`."""
        tokens = self.source.tokens
        utilities = any(
            a.text == "metal" and b.text == "::" and c.text in ("declval", "move", "forward", "swap", "decay")
            for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False)
        )
        swizzles = any(a.text in (".", "->") and _RARE_SWIZZLE.match(b.text) for a, b in itertools.pairwise(tokens))
        tensors = any(t.text in ("tensor_ops", "extents", "dextents") for t in tokens)
        asked = {"UTILITIES": utilities, "ALL_SWIZZLES": swizzles, "TENSORS": tensors}
        return "".join(f"#define METALMM_{name} 1\n" for name, is_asked in asked.items() if is_asked)

    def _entry(self, definition: Declaration, instance: Instance, limit: str, specs: list[str], template: str, parameters: str) -> str:
        """What stands behind the program, of one instance. limit: of its threads; template, parameters: the definition's."""
        arguments, signature = self.passes.erased_text(instance.arguments), self.passes.erased_text(instance.signature)
        is_cast = (
            instance.declaration is not definition
            and (instance.arguments is None or len(self.program.definitions[definition.name]) > 1)
            and bool(signature)
        )
        if not is_cast and not template and self.program.shares_name(definition):
            is_cast, signature = True, parameters
        # From the global namespace: a kernel may have the name of something in metal.
        scope = "::".join(("METALMM_SCOPE", *definition.namespace))
        function, of = f"&{scope}::{definition.name}", f"<{arguments}>" if instance.arguments else ""
        function += of
        lines, threads = list[str](), f"static_cast<::metalmm::abi::u32>({limit})"
        # Which overload its parameters say; these and its arguments have a meaning in the scope where they were written.
        inner = "::".join(instance.declaration.namespace)
        held = "::".join(("METALMM_SCOPE", *instance.declaration.namespace, "metalmm_"))
        if is_cast or (inner and of):
            cast = f"static_cast<void (*)({signature})>({function})" if is_cast else function
            lines.append(f"static constexpr auto metalmm_function = {cast};")
            function = f"{held}function"
        if limit != "0" and (is_cast or of):
            if is_cast:
                lines.append(f"{template} constexpr ::metalmm::abi::u32 metalmm_limit(void (*)({parameters})) {{ return ({limit}); }}")
            else:
                lines.append(f"{template} struct metalmm_limit {{ static constexpr ::metalmm::abi::u32 value = ({limit}); }};")
            lines.append(f"static constexpr auto metalmm_thread_limit = metalmm_limit{of}{f'({function})' if is_cast else '::value'};")
            threads = f"{held}thread_limit"
        holder = "".join(line + "\n" for line in ([f"namespace {inner} {{", *lines, "}"] if inner and lines else lines))
        table, where = ", ".join(specs) or "{}", "".join(f"{name}::" for name in definition.namespace)
        constants = (  # in the definition's namespace, where the words of its attributes have a meaning
            f"static constexpr ::metalmm::abi::ArgSpec metalmm_args[] = {{{table}}};\n"
            f"static constexpr ::metalmm::abi::u32 metalmm_threads = {threads};\n"
        )
        return (
            holder
            + (f"namespace {'::'.join(definition.namespace)} {{\n{constants}}}\n" if definition.namespace else constants)
            + f"using metalmm_function_type = decltype(+{function});\n"
            f"METALMM_KERNEL({where}metalmm_threads, {where}metalmm_args, {function});\n"
        )


def lower(
    text: str,
    kernel: str,
    constants: Mapping[int | str, bool | int | float] | None = None,
    *,
    name: str = "<source>",
    compiler: str = "gcc",
    stops: bool = False,
    converged: bool = False,
    choose: Collection[str] = (),
) -> str:
    """C++ for the kernel `kernel` of the preprocessed MSL `text`; compiler: gcc, clang, or nvrtc for CUDA C++.

    converged: all lanes of a simdgroup are known to be together at each of its operations.

    Raises LoweringError (with file, line and construct) where the text holds what the CPU device cannot take, and
    CompileError for an unknown kernel or function constant.
    """
    return lower_all(text, [kernel], constants, name=name, compiler=compiler, stops=stops, converged=converged, choose=choose)[kernel]


def lower_all(
    text: str,
    kernels: Sequence[str],
    constants: Mapping[int | str, bool | int | float] | None = None,
    *,
    name: str,
    compiler: str,
    stops: bool = False,
    converged: bool = False,
    choose: Collection[str] = (),
) -> dict[str, str]:
    """The same for several kernels of one text, by name. Instances of one template are lowered at once."""
    found = dict[str, str]()
    while left := [kernel for kernel in kernels if kernel not in found]:
        target = CpuTarget(parsed(Program, text, name))
        found |= target.lower(left, constants, compiler, stops=stops, converged=converged, choose=choose)
    return found
