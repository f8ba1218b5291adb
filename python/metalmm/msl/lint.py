"""How near to Apple's compiler a check of MSL comes without it: upstream clang's parser, and rules that upstream has not.

The engine is `libclang` of PyPI (`pip install libclang`), which parses the file as C++ for OpenCL (opencl.py). What is accepted here
may still be refused by Apple's compiler; what is refused here is, as far as the MSL specification and the files that were tried tell.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import cache, compiler
from ..errors import CompilerNotFoundError, DeviceError, Error
from ..kernel_source import resource
from .opencl import SPACES, Rewriter
from .program import Declaration
from .program_scope import parsed
from .rules import LANES, POSITIONS, UNSIGNED

_ARGUMENTS = [
    "-x",
    "clcpp",
    "-cl-std=clc++2021",
    "-cl-no-stdinc",
    "-nostdinc",
    "-target",
    "x86_64-unknown-linux",
    "-ferror-limit=0",
    "-ftemplate-backtrace-limit=0",
    "-Xclang",
    "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space,+__cl_clang_function_pointers",
    "-cl-single-precision-constant",
    "-Wno-everything",
    "-Werror=return-type",
    "-Wno-unknown-attributes",
    "-Wconditional-type-mismatch",
    "-Wc99-designator",
    "-Xclang",
    "-fvalidate-ast-input-files-content",  # headers that are kept once parsed: the same text, installed anew, is the same
]
_INPUT = "msl.clcpp"
_DECLARATIONS = resource("csrc/msl") / "lint" / "declarations.h"
_PLAIN = ["-include", str(_DECLARATIONS)]

# The MSL specification's list of what of C++ is not in the language.
_BANNED = {
    "virtual": "virtual functions",
    "new": "operator new",
    "delete": "operator delete",
    **dict.fromkeys(("throw", "try", "catch"), "exceptions"),
    **dict.fromkeys(("dynamic_cast", "typeid"), "run-time type information"),
    "goto": "goto",
    "thread_local": "thread_local",
    "double": "double",
    **dict.fromkeys(("asm", "__asm__"), "inline assembly"),
    **dict.fromkeys(("co_await", "co_yield", "co_return"), "coroutines"),
    **dict.fromkeys(("requires", "concept", "consteval", "constinit"), "C++20"),
}
_INDEXED = ("buffer", "texture", "sampler", "threadgroup")
_ARGUMENT_ATTRIBUTES = {*POSITIONS, *LANES, *_INDEXED, "stage_in", "function_constant", "maybe_unused", "id", "raster_order_group"}
_FUNCTION_ATTRIBUTES = {
    "kernel",
    "host_name",
    "max_total_threads_per_threadgroup",
    "required_threads_per_threadgroup",
    "maybe_unused",
    "nodiscard",
    "visible",
    "stitchable",
    "user_annotation",
    "vertex",
    "fragment",
    "always_inline",
    "noinline",
}


@dataclass(frozen=True)
class Finding:
    """Something that Apple's compiler refuses. place: "file:line"; rule: clang, space, language, kernel, attribute, name or parser."""

    place: str
    text: str
    rule: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text} [{self.rule}]"


def available() -> bool:
    """Whether libclang is installed."""
    try:
        _clang()
    except CompilerNotFoundError:
        return False
    return True


def _clang() -> Any:
    os.environ.setdefault("LIBCLANG_DISABLE_CRASH_RECOVERY", "1")  # whose handlers of faults would stand before the CPU device's
    try:
        cindex = importlib.import_module("clang.cindex")
        cindex.Index.create()  # finds and loads the library
    except Exception as error:  # its own class is of the module that may not be there
        raise CompilerNotFoundError(f"lint needs libclang ({error}); pip install libclang") from None
    return cindex


def check(text: str, name: str, include_dirs: Sequence[str | Path] = (), defines: Mapping[str, object] | None = None) -> list[Finding]:
    """What is wrong with MSL, each once, in the order of the text. name: the file that places will name.

    Raises CompilerNotFoundError without libclang, or without a C++ compiler, whose preprocessor it needs; CompileError where that fails.
    """
    return check_preprocessed(compiler.preprocess(text, name, include_dirs, defines, for_metal=True), name)


def check_preprocessed(text: str, name: str) -> list[Finding]:
    """The same for what a preprocessor has left."""
    clang = _clang()
    try:
        program = parsed(_Rules, text, name)
        findings = list(program.findings())
        if any(t.text == "tensor_ops" for t in program.source.tokens):  # upstream knows nothing of Metal 4's tensors
            return findings
        rewritten = program.rewritten()
    except Error as error:
        place, _, what = str(error).partition(": ")
        return [Finding(place, what, "parser")]
    findings += [replace(f, text=_in_msl(f.text)) for f in _Checked(clang, rewritten, name).findings()]
    return list(dict.fromkeys(findings))


def _in_msl(text: str) -> str:
    """A message of clang's with MSL's names in it."""
    for space, name in (("__global", "device"), ("__local", "threadgroup"), ("__constant", "constant"), ("__private", "thread")):
        text = text.replace(space, name)
    return text.replace("__generic ", "").replace("*thread", "*").replace("&thread", "&").replace("metalmm_", "")


class _Rules(Rewriter):
    """Rules of the language, and of kernels, that upstream clang has not."""

    def findings(self) -> Iterator[Finding]:
        tokens = self.source.tokens
        for i, t in enumerate(tokens[1:], 1):
            if t.text == tokens[i - 1].text == "long":
                yield Finding(self.source.place(i), "long long is not in MSL", "language")
        for i, t in enumerate(tokens):
            if t.kind != "name" or t.text not in _BANNED or (i and tokens[i - 1].text in (".", "->", "::")):
                continue
            if not (t.text == "delete" and tokens[i - 1].text == "="):
                yield Finding(self.source.place(i), f"{_BANNED[t.text]}: '{t.text}' is not in MSL", "language")
        for kernels in self.definitions.values():
            for d in kernels:
                yield from self._kernel(d)
        for name, instances in self.instances.items():
            for other in instances[1:]:
                yield Finding(self.source.place(other.declaration.start), f"two kernels are called {name}", "name")

    def _kernel(self, d: Declaration) -> Iterator[Finding]:
        tokens, opening = self.source.tokens, self._parameter_list(d)
        close, first = self.source.matching(opening), self.source.behind_templates(d.start)

        def plain(start: int, end: int) -> list[str]:
            return [tokens[i].text for i in range(start, end) if not any(a.start <= i < a.end for a in d.attributes)]

        words = [w for w in plain(first, opening)[:-1] if w not in ("kernel", "static", "inline", "extern", "constexpr")]
        if words and words != ["void"]:
            yield Finding(self.source.place(first), f"a kernel returns void, not {' '.join(words)}", "kernel")
        for a in d.attributes:
            for name in a.names:
                if a.start < opening and name not in _FUNCTION_ATTRIBUTES:
                    yield Finding(self.source.place(a.start), f"unknown attribute [[{name}]] of a kernel", "attribute")
        used = set[tuple[str, str]]()
        for start, end in self.source.split(opening + 1, close):
            for text in self._argument(start, end, used):
                yield Finding(self.source.place(start), text, "attribute")

    def _argument(self, start: int, end: int, used: set[tuple[str, str]]) -> Iterator[str]:
        tokens, i = self.source.tokens, start
        names, words = dict[str, tuple[int, int]](), list[str]()
        while i < end:
            if tokens[i].text == "[" and tokens[i + 1].text == "[":
                attribute = self.attribute(i)
                names.update(attribute.names)
                i = attribute.end
            else:
                words.append(tokens[i].text)
                i += 1
        if words in ([], ["void"]):
            return
        is_memory = any(w in ("*", "&", "[") for w in words)
        kind = " ".join(w for w in words[:-1] if w not in ("const", "metal", "::"))
        for name, span in names.items():
            if name not in _ARGUMENT_ATTRIBUTES:
                yield f"unknown attribute [[{name}]] of a kernel argument"
            elif name in _INDEXED:
                yield from self._indexed(name, "".join(t.text for t in tokens[slice(*span)]), words, is_memory, used, names)
            elif name in POSITIONS | LANES and not is_memory:
                vectors = {f"{base}{n}" for base in ("ushort", "uint") for n in (2, 3)} if name in POSITIONS else set()
                if kind.replace("short int", "short") not in UNSIGNED | vectors:
                    yield f"[[{name}]] of type {kind}"
        if not names and not is_memory:
            yield f"kernel argument '{' '.join(words)}' has no attribute"

    def _indexed(
        self, name: str, index: str, words: list[str], is_memory: bool, used: set[tuple[str, str]], names: Mapping[str, Any]
    ) -> Iterator[str]:
        if (name, index) in used and "function_constant" not in names:
            yield f"two arguments at [[{name}({index})]]"
        used.add((name, index))
        if name == "buffer":
            if index.isdigit() and int(index) > 30:
                yield f"[[buffer({index})]]: indices go from 0 to 30"
            if not is_memory and len(words) == 2:
                yield f"[[buffer]] on '{' '.join(words)}', which is neither pointer nor reference"
            if is_memory and not set(words) & {"device", "constant"}:
                yield "a buffer is in device or constant"
        if name == "threadgroup" and "threadgroup" not in words:
            yield "[[threadgroup]] on something that is not in threadgroup memory"


# Upstream copies a structure from the generic space, which constant is no part of; Apple's compiler copies from any to any. And upstream
# puts no temporary into __private, so that no reference into it binds to one.
_COPY = re.compile(r"the implicit (?:copy|move) (?:constructor|assignment operator)\).*'__constant'")
_TEMPORARY = re.compile(r"'(?:const )?(?:volatile )?__private .*cannot bind to a temporary object because of address space mismatch")
# What Apple's compiler takes: a vector times a scalar of more bits; bfloat of half; vectors from lists, also of too few, and as arguments.
_TAKEN = re.compile(
    r"scalar operand type has greater rank|use of overloaded operator '\[\]' is ambiguous \(with operand types 'matrix<|too few elements in vector initialization"
    r"|cast from '(?:half|__bf16|bfloat)'.* to '(?:half|__bf16|bfloat)'.* is not allowed"
)
_LIST = re.compile(r"cannot convert initializer list argument to '(?:const )?(?:__private )?\w+[234]'")
# Upstream keeps a temporary in the generic space, so that a call's `const thread T&` binds to none.
_RVALUE = re.compile(
    r"cannot bind reference in default address space to object in address space '__private' in (\d+)\w\w argument"
    r"|cannot deduce a type for '\w+' that would make '[^']*__private [^']*' equal '(?!(?:const )?(?:volatile )?__)"
)
_THIS = "'this' object is in default address space, but method expects object in address space '__private'"
_SPACE = re.compile(r"__(?:global|local|constant|private)\b")


@functools.cache
def _declarations_key(clang: Any) -> str:
    version = clang.conf.lib.clang_getClangVersion
    version.restype = clang._CXString
    texts = [
        clang.conf.lib.clang_getCString(version()),
        str(_DECLARATIONS),
        *_ARGUMENTS,
        cache.digest_of(sorted(_DECLARATIONS.parent.iterdir())),
    ]
    return cache.key_of(*texts)


def _declarations(clang: Any) -> list[str]:
    """Arguments that name MSL's declarations as libclang keeps them once parsed: a small kernel is checked in a tenth of the time by them."""

    def parse(target: Path) -> None:
        options = clang.TranslationUnit.PARSE_INCOMPLETE
        clang.Index.create().parse(str(_DECLARATIONS), args=_ARGUMENTS, options=options).save(str(target))

    try:
        return ["-include-pch", str(cache.fetch(f"{_declarations_key(clang)}.pch", parse))]
    except (DeviceError, clang.TranslationUnitLoadError, clang.TranslationUnitSaveError):  # where no folder takes it
        return _PLAIN


def _unit(clang: Any, text: str) -> Any:
    def parse(declarations: Sequence[str]) -> Any:
        return clang.Index.create().parse(_INPUT, args=[*_ARGUMENTS, *declarations], unsaved_files=[(_INPUT, text)])

    try:
        return parse(_declarations(clang))
    except clang.TranslationUnitLoadError:  # the headers have changed under this process
        return parse(_PLAIN)


class _Checked:
    """What libclang finds, and rules that need its types: pointers without an address space, recursion, pointers to functions."""

    def __init__(self, clang: Any, text: str, name: str) -> None:
        self._clang, self._name, self._text = clang, name, text
        self._unit = _unit(clang, text)
        self._lines = _places(text, name)
        self._calls = dict[str, tuple[Any, set[str]]]()

    def _is_ours(self, location: Any) -> bool:
        return location.file is not None and location.file.name == _INPUT

    def _place(self, location: Any) -> str:
        return self._lines[location.line] if self._is_ours(location) else self._name

    def findings(self) -> Iterator[Finding]:
        for d in self._unit.diagnostics:
            if d.severity < self._clang.Diagnostic.Error or self._is_upstreams_own(d):
                continue
            where = next((at for at in (d.location, *(n.location for n in d.children)) if self._is_ours(at)), d.location)
            yield Finding(self._place(where), d.spelling, "clang")
        yield from self._walk(self._unit.cursor)
        yield from self._recursions()

    def _is_upstreams_own(self, d: Any) -> bool:
        if _TAKEN.search(d.spelling) or _TEMPORARY.search(d.spelling):
            return True
        notes = [n.spelling for n in d.children]
        if d.spelling.startswith(
            ("no matching function", "no matching member", "no matching constructor", "no viable overloaded", "invalid operands")
        ) and any(map(self._takes_temporary, d.children)):
            return True
        if d.spelling.startswith("no matching function") and any(map(_LIST.search, notes)):
            return True
        return d.spelling.startswith(("no matching constructor", "no viable overloaded '='")) and any(map(_COPY.search, notes))

    def _takes_temporary(self, note: Any) -> bool:
        """Whether a candidate was passed over only for a temporary that its `const thread T&` takes."""
        if note.spelling.endswith(_THIS):
            return True
        if not (m := _RVALUE.search(note.spelling)) or not self._is_ours(note.location):
            return False
        rest = self._text.encode()[note.location.offset :].decode(errors="replace")
        parameters = re.split(r",(?![^<(]*[>)])", rest[rest.index("(") + 1 :].split(")")[0]) if "(" in rest else []
        chosen = parameters[int(m[1]) - 1 : int(m[1])] if m[1] else parameters
        return any(re.search(r"\bconst\b.*&", x) for x in chosen)

    def _walk(self, node: Any) -> Iterator[Finding]:
        kinds = self._clang.CursorKind
        aliases = (kinds.TYPEDEF_DECL, kinds.TYPE_ALIAS_DECL)
        variables = (kinds.VAR_DECL, kinds.PARM_DECL)
        typed = {
            *variables,
            *aliases,
            kinds.FIELD_DECL,
            kinds.CSTYLE_CAST_EXPR,
            kinds.CXX_REINTERPRET_CAST_EXPR,
            kinds.CXX_STATIC_CAST_EXPR,
        }
        functions = (kinds.FUNCTION_DECL, kinds.CXX_METHOD, kinds.FUNCTION_TEMPLATE)
        for child in node.get_children():
            if not self._is_ours(child.location):
                continue
            place = self._place(child.location)
            if child.kind in typed:
                of = child.underlying_typedef_type if child.kind in aliases else child.type
                if (bad := self._without_space(of)) and "(lambda" not in bad:
                    what = "reference" if "&" in bad else "pointer"
                    yield Finding(place, f"{what} type must have an address space: '{child.spelling}' is {bad}", "space")
            elif child.kind in functions:
                if bad := self._without_space(child.result_type):
                    yield Finding(place, f"the result of '{child.spelling}' must have an address space: {bad}", "space")
                if child.is_definition():
                    called = set[str]()
                    self._called(child, called)
                    self._calls[child.get_usr()] = (child, called)
            if child.kind in variables:
                yield from self._variable(child, place)
            if child.kind == kinds.CONDITIONAL_OPERATOR:
                first = next(child.get_children()).type.get_canonical()
                if "ext_vector_type" in first.spelling or "boolN<" in first.spelling:
                    yield Finding(place, "the first operand of ?: must be a scalar; select() takes vectors", "language")
            yield from self._walk(child)

    def _variable(self, cursor: Any, place: str) -> Iterator[Finding]:
        types = self._clang.TypeKind
        canonical = cursor.type.get_canonical()
        if canonical.kind == types.POINTER and canonical.get_pointee().kind in (types.FUNCTIONPROTO, types.FUNCTIONNOPROTO):
            yield Finding(place, f"'{cursor.spelling}' is a function pointer; only a template's argument may be one", "language")
        words = set[str]()
        for token in cursor.get_tokens():
            if token.spelling in ("=", "{", ";", ":"):
                break
            words.add(token.spelling)
        if "auto" in words and words & {"*", "&"} and not words & set(SPACES.values()):
            yield Finding(place, f"'{cursor.spelling}', an auto pointer or reference, must have an address space", "space")

    def _without_space(self, of: Any) -> str | None:
        """The type, if it points to something for which no address space was written."""
        types = self._clang.TypeKind
        arrays = (types.CONSTANTARRAY, types.INCOMPLETEARRAY, types.DEPENDENTSIZEDARRAY)
        t = of
        while t.kind in (*arrays, types.POINTER, types.LVALUEREFERENCE):
            if t.kind in arrays:
                t = t.element_type
                continue
            pointee = t.get_pointee()
            if not _SPACE.search(pointee.get_canonical().spelling):
                return str(of.spelling)
            t = pointee
        return None

    def _called(self, node: Any, into: set[str]) -> None:
        for child in node.get_children():
            if child.kind == self._clang.CursorKind.CALL_EXPR and child.referenced is not None:
                into.add(child.referenced.get_usr())
            self._called(child, into)

    def _recursions(self) -> Iterator[Finding]:
        for usr, (cursor, direct) in self._calls.items():
            seen, queue = set[str](), set(direct)
            while queue and usr not in queue:
                one = queue.pop()
                if one not in seen and one in self._calls:
                    queue |= self._calls[one][1]
                seen.add(one)
            if queue:
                yield Finding(self._place(cursor.location), f"recursion: '{cursor.spelling}' comes to call itself", "language")


def _places(text: str, name: str) -> dict[int, str]:
    """Where each line of a preprocessed text is from, by its line markers."""
    places, file, line = dict[int, str](), name, 1
    for number, row in enumerate(text.split("\n"), 1):
        places[number] = f"{file}:{line}"
        if m := re.match(r'^#\s*(?:line\s+)?(\d+)(?:\s+"((?:\\.|[^"\\])*)")?', row):
            file, line = re.sub(r"\\(.)", r"\1", m[2]) if m[2] else file, int(m[1])
        else:
            line += 1
    return places
