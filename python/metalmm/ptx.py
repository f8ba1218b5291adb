"""PTX that asks before each access to memory: what Device("cuda", debug=True) runs."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

# A load, a store or an atomic operation, with its predicate.
_ACCESS = re.compile(
    r"(?<![\w.%$])(?:@(?P<unless>!?)(?P<given>%\w+)\s+)?"
    r"(?P<access>(?P<kind>ld|st|atom|red|cp\.async)(?P<what>(?:\.[\w:]+)+)\s+(?P<rest>(?:[^;{}]|\{[^}]*\})*));"
)
_ADDRESS = re.compile(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\d+)\s*)?\]")
_TYPE = re.compile(r"(?:[busf]|bf)(\d+)(x2)?$")
_NOT_LOOKED_AT = {"param", "param::entry", "param::func", "const", "local", "bulk", "mbarrier", "shared::cluster"}
_KINDS = {"ld": 0, "cp.async": 0, "st": 1}
_ATOMIC, _THREADGROUP = 2, 4  # csrc/msl/runtime/cuda/arguments.h
_LINE = re.compile(r"\t\.loc\t(\d+) (\d+) (\d+)(?:, function_name \S+, inlined_at (\d+) (\d+) (\d+))?")
_LINE_BITS = 20
_FILE = re.compile(r'^\t\.file\t(\d+) "([^"]*)"', re.MULTILINE)
_SECTION = re.compile(r"^\t\.section\t\.debug\w*\n\t\{\n.*?^\t\}\n", re.MULTILINE | re.DOTALL)
_GLOBAL = re.compile(r"^(?:\.visible )?\.global \.align \d+ \.[busf](\d+) (\w+)(?:\[(\d+)\])?(?: = [^;]*)?;$", re.MULTILINE)

# Of csrc/msl/runtime/cuda/arguments.h's Watch: where the ends of spans begin, and what follows them.
_WATCH = {
    "ends": 2048,
    "count_at": 4096,
    "refused_at": 4100,
    "access_at": 4104,
    "site_at": 4108,
    "address_at": 4112,
    "group_at": 4120,
    "thread_at": 4132,
    "hidden_at": 4136,
}

# No call: ptxas 13.0 makes wrong code of a kernel with many registers and calls. Nor a way by which lanes that come together leave apart, if
# all may: a kernel may ask which are there.
_ASKED = """{{
	.reg .pred 	%mm_may, %mm_p, %mm_q;
	.reg .b32 	%mm_n;
	.reg .b64 	%mm_at, %mm_end, %mm_x, %mm_of;
	{unless}{address};
	add.s64 	%mm_end, %mm_at, {size};
{reach}	and.b64 	%mm_x, %mm_at, {mask};
	setp.eq.u64 	%mm_p, %mm_x, 0;
	and.pred 	%mm_may, %mm_may, %mm_p;
	@%mm_may bra 	$mm_go_{unique};
	atom.global.add.u32 	%mm_n, [metalmm_watch+{refused_at}], 1;
	setp.ne.u32 	%mm_p, %mm_n, 0;
	@%mm_p bra 	$mm_go_{unique};
	st.global.u32 	[metalmm_watch+{access_at}], {access};
	st.global.u32 	[metalmm_watch+{site_at}], {site};
	st.global.u64 	[metalmm_watch+{address_at}], %mm_at;
	mov.u32 	%mm_n, %ctaid.x;
	st.global.u32 	[metalmm_watch+{group_at}], %mm_n;
	mov.u32 	%mm_n, %ctaid.y;
	st.global.u32 	[metalmm_watch+{group_at}+4], %mm_n;
	mov.u32 	%mm_n, %ctaid.z;
	st.global.u32 	[metalmm_watch+{group_at}+8], %mm_n;
	mov.u32 	%mm_n, %tid.x;
	st.global.u32 	[metalmm_watch+{thread_at}], %mm_n;
$mm_go_{unique}:
	@%mm_may {instruction};
$mm_skip_{unique}:
	}}"""
_IN_THREADGROUP = """	mov.u32 	%mm_n, %total_smem_size;
	cvt.u64.u32 	%mm_x, %mm_n;
	mov.u32 	%mm_n, %reserved_smem_offset_cap;
	cvt.u64.u32 	%mm_of, %mm_n;
	add.s64 	%mm_x, %mm_x, %mm_of;
	ld.global.u32 	%mm_n, [metalmm_watch+{hidden_at}];
	cvt.u64.u32 	%mm_of, %mm_n;
	sub.s64 	%mm_x, %mm_x, %mm_of;
	setp.le.u64 	%mm_may, %mm_end, %mm_x;
"""
_IN_A_SPAN = """	mov.u64 	%mm_of, metalmm_watch;
	ld.global.u32 	%mm_n, [metalmm_watch+{count_at}];
$mm_next_{unique}:
	ld.global.u64 	%mm_x, [%mm_of];
	setp.ge.u64 	%mm_p, %mm_at, %mm_x;
	ld.global.u64 	%mm_x, [%mm_of+{ends}];
	setp.le.u64 	%mm_q, %mm_end, %mm_x;
	and.pred 	%mm_p, %mm_p, %mm_q;
	or.pred 	%mm_may, %mm_may, %mm_p;
	add.s64 	%mm_of, %mm_of, 8;
	sub.s32 	%mm_n, %mm_n, 1;
	setp.gt.s32 	%mm_p, %mm_n, 0;
	@%mm_p bra 	$mm_next_{unique};
"""
_NOWHERE = "	setp.ne.u64 	%mm_may, %mm_at, %mm_at;\n"
_IF_NOTHING = "	setp.eq.u32 	%mm_may, {}, 0;\n"  # bytes that cp.async brings, of those that it stores
_ELSEWHERE = "	isspacep.const 	%mm_may, %mm_at;\n" + "".join(
    f"	isspacep.{space} 	%mm_p, %mm_at;\n	or.pred 	%mm_may, %mm_may, %mm_p;\n" for space in ("param", "local", "shared")
)


class _Sites:
    """Where the code stands. An access in a header of the runtime stands where the kernel called the header's function."""

    def __init__(self, ptx: str, runtime: str) -> None:
        files = dict(_FILE.findall(ptx))
        here = str(Path.cwd()) + "/"  # NVRTC puts it before a name
        self.names = [name.removeprefix(here) for name in files.values()]
        self._numbers = {n: i for i, n in enumerate(files)}
        self._hidden = {n for n, name in files.items() if name.startswith(runtime)}
        self._callers: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.now = 0

    def read(self, line: str) -> None:
        if not (found := _LINE.match(line)):
            return
        place, caller = found.group(1, 2, 3), found.group(4, 5, 6)
        self._callers[place] = caller
        for _ in range(64):
            if place[0] not in self._hidden or not self._callers.get(place, (None,))[0]:
                break
            place = self._callers[place]
        self.now = self._numbers[place[0]] << _LINE_BITS | min(int(place[1]), (1 << _LINE_BITS) - 1)


def watched(compiled: bytes, runtime: str, capability: int) -> bytes:
    """That code with a look at metalmm_watch (csrc/msl/runtime/cuda/arguments.h) before each access to memory, which does not happen where that
    has no span with it.

    Its variable metalmm_files has a line for each source file, in the order of the numbers that a site has. Of each global variable that it
    uses, address and bytes stand in metalmm_own.

    Args:
        compiled: PTX of one kernel, compiled with -lineinfo.
        runtime: The folder whose files' lines say nothing to the kernel's author.
        capability: Of the GPU. The code says the least version of PTX that has it, for a driver takes none newer than itself.
    """
    ptx = compiled.rstrip(b"\0").decode("latin-1")
    sites, code = _Sites(ptx, runtime), list[str]()
    for line in _SECTION.sub("", ptx).split("\n"):
        if line.startswith(("\t.loc\t", "\t.file\t", "\t.pragma", ".version")):
            sites.read(line)
        else:
            code.append(_ACCESS.sub(lambda m: _asked(m, sites.now, f"{len(code)}_{m.start()}"), line) if "[" in line else line)
    text = "\n".join(code)
    seen = Counter(re.findall(r"\w+", text))
    own = [
        f"generic({name}), {int(bits) // 8 * int(count or 1)}"
        for bits, name, count in _GLOBAL.findall(text)
        if name != "metalmm_watch" and seen[name] > 1
    ]
    listed = "\n".join(sites.names).encode("latin-1") + b"\0"
    version = "8.0" if capability <= 90 else "8.8"
    end = f".visible .global .align 8 .u64 metalmm_own[{max(2 * len(own), 1)}] = {{{', '.join(own) or 0}}};\n"
    end += f".visible .global .align 1 .b8 metalmm_files[{len(listed)}] = {{{', '.join(map(str, listed))}}};\n"
    return f".version {version}\n{text}\n{end}".encode("latin-1")


def _asked(found: re.Match[str], site: int, unique: str) -> str:
    what = found["what"].split(".")[1:]
    addresses = _ADDRESS.findall(found["rest"])
    if not addresses or _NOT_LOOKED_AT & set(what) or (found["kind"] == "cp.async" and len(addresses) < 2):
        return found[0]
    threadgroup = any(w.startswith("shared") for w in what) and found["kind"] != "cp.async"
    if found["kind"] == "cp.async":
        register, offset = addresses[1]
        _, _, stored, *brought = found["rest"].split(",")
        size, nowhere = int(stored), _IF_NOTHING.format(brought[0].strip()) if brought else _NOWHERE
    else:
        register, offset = addresses[0]
        nowhere = _NOWHERE if "global" in what else _ELSEWHERE
        bits, two = next(m.groups() for w in reversed(what) if (m := _TYPE.match(w)))
        size = int(bits) // 8 * (2 if two else 1) * next((int(w[1]) for w in what if w in ("v2", "v4", "v8")), 1)
    address = f"add.s64 \t%mm_at, {register}, {offset or 0}"
    if not register.startswith("%"):  # a variable of the module, or of the threadgroup
        address = f"mov.u64 \t%mm_at, {register};\n\tadd.s64 \t%mm_at, %mm_at, {offset or 0}"
    elif not register.startswith("%rd"):
        address = f"cvt.u64.u32 \t%mm_at, {register};\n\tadd.s64 \t%mm_at, %mm_at, {offset or 0}"
    reach = _IN_THREADGROUP if threadgroup else nowhere + _IN_A_SPAN
    return _ASKED.format(
        unless=f"@{'' if found['unless'] else '!'}{found['given']} bra $mm_skip_{unique};\n\t" if found["given"] else "",
        address=address,
        size=size,
        mask=size - 1,
        reach=reach.format(unique=unique, **_WATCH),
        access=size | (_KINDS.get(found["kind"], _ATOMIC) | (_THREADGROUP if threadgroup else 0)) << 8,
        site=site,
        instruction=found["access"],
        unique=unique,
        **_WATCH,
    )
