"""Write Objective-C headers for the Metal API facts in metal_api.json.

usage: python make_headers.py metal_api.json OUTDIR [--only NAME,NAME...] [--sdk VERSION]

Writes OUTDIR/Metal/Metal.h and
OUTDIR/MetalPerformanceShaders/MetalPerformanceShaders.h. With --only, just the
named protocols, classes, enums, structs, functions and constants are declared,
plus what they need by value or inherit from; other types are forward-declared.
With --sdk, what that SDK of macOS lacks is left out, as availability.json beside
this file says, and what is newer than macOS 14 is marked as such, so that clang
tells a use without @available from one behind it.
"""

import argparse
import json
import re
from pathlib import Path

FRAMEWORKS = {"Metal": ["Foundation/Foundation.h"], "MetalPerformanceShaders": ["Metal/Metal.h"]}
TABLES = ("protocols", "classes", "enums", "structs", "typedefs", "external_types")


def words(*types):
    return set(re.findall(r"[A-Za-z_]\w*", " ".join(types)))


def declare(ctype, name):
    """C declaration of `name` with a type spelled as in the fact file."""
    if "(^)" in ctype:
        return ctype.replace("(^)", f"(^{name})", 1)
    if array := re.fullmatch(r"(.+)(\[\d+\])", ctype):
        return f"{array[1]} {name}{array[2]}"
    return f"{ctype}{'' if ctype.endswith('*') else ' '}{name}"


OLDEST = 14  # macOS; names of its SDK carry no version


class Api:
    def __init__(self, facts, since=None, sdk=None):
        """since: availability.json, for the headers of an SDK of macOS, and with their versions; without it, all names and none."""
        self.since = since or {"types": {}, "methods": {}, "values": {}}
        self.sdk = sdk
        if since:
            self.leave_out_newer(facts)
        self.__dict__.update({table: facts[table] for table in TABLES})
        self.functions = {f["name"]: f for f in facts["functions"]}
        self.constants = {c["name"]: c for c in facts["constants"]}
        self.tables = [getattr(self, t) for t in TABLES] + [self.functions, self.constants]
        self.entries = {name: entry for table in self.tables for name, entry in table.items()}
        self.all_protocols = set(self.protocols) | set(re.findall(r"id<(\w+)>", json.dumps(facts)))

    def leave_out_newer(self, facts):
        def there(table, name):
            return table.get(name, OLDEST) <= self.sdk

        types, methods, values = (self.since[kind] for kind in ("types", "methods", "values"))
        for table in ("protocols", "classes"):
            facts[table] = {name: entry for name, entry in facts[table].items() if there(types, name)}
            for name, entry in facts[table].items():
                entry["inherits"] = [parent for parent in entry["inherits"] if there(types, parent)]
                entry["methods"] = [m for m in entry["methods"] if there(methods.get(name, {}), m["selector"])]
        for name, entry in list(facts["enums"].items()):
            entry["values"] = {key: value for key, value in entry["values"].items() if there(values, key)} or facts["enums"].pop(name)[
                "values"
            ]

    def marked(self, table, *names):
        """The attribute of what is newer than the oldest macOS."""
        for name in names:
            table = table.get(name, {})
        return f" __attribute__((availability(macos,introduced={table}.0)))" if table else ""

    def mentions(self, entry):
        """Every identifier used in the types of one entry."""
        names = set(entry.get("inherits", [])) | set(entry.get("conforms", []))
        for part in [entry, *entry.get("methods", []), *entry.get("fields", [])]:
            names |= words(part.get("returns", ""), part.get("type", ""), *part.get("args", []))
        return names

    def select(self, only):
        """`only` and all that it cannot be declared without."""
        if only is None:
            return set(self.entries)
        if unknown := sorted(set(only) - set(self.entries)):
            raise SystemExit("not in the fact file: " + ", ".join(unknown))
        chosen, queue = set(), list(only)
        while queue:
            name = queue.pop()
            if name in chosen or name not in self.entries:
                continue
            chosen.add(name)
            entry = self.entries[name]
            queue += entry.get("inherits", []) + entry.get("conforms", [])
            queue += self.mentions(entry) - set(self.protocols) - set(self.classes)
        return chosen

    def is_block(self, ctype):
        return "(^" in ctype or any("(^" in self.typedefs[w]["type"] for w in words(ctype) if w in self.typedefs)

    def guarded(self, text, *types):
        if any(map(self.is_block, types)):
            return f"#if __has_feature(blocks)\n{text}\n#endif"
        return text

    def signature(self, method):
        sign = "+" if method["kind"] == "class" else "-"
        text = f"{sign} ({method['returns']})"
        if not method["args"]:
            return text + method["selector"]
        keys = method["selector"].split(":")
        return text + " ".join(f"{k}:({t}){n}" for k, t, n in zip(keys, method["args"], method["names"], strict=False))

    def inherited(self, entry, kind, selector):
        """The declaration that an `unavailable` entry takes away."""
        for parent in entry["inherits"]:
            for method in self.classes.get(parent, {}).get("methods", []):
                if (method["kind"], method["selector"]) == (kind, selector):
                    return method
            if parent in self.classes:
                return self.inherited(self.classes[parent], kind, selector)
        return dict(kind=kind, selector=selector, returns="instancetype", args=[])

    def members(self, entry, name):
        lines, optional = [], False
        setters = {m["selector"] for m in entry["methods"]}
        done = set()
        for method in entry["methods"]:
            if method["selector"] in done:
                continue
            mark = self.marked(self.since["methods"], name, method["selector"])
            if method["optional"] != optional:
                optional = method["optional"]
                lines.append("@optional" if optional else "@required")
            if prop := method.get("property"):
                setter = f"set{prop[0].upper()}{prop[1:]}:"
                access = "readwrite" if setter in setters else "readonly"
                done.add(setter)
                decl = declare(method["returns"], prop)
                lines.append(f"@property ({access}, getter={method['selector']}) {decl}{mark};")
            else:
                lines.append(self.guarded(self.signature(method) + mark + ";", method["returns"], *method["args"]))
        for taken in entry.get("unavailable", []):
            method = self.inherited(entry, "class" if taken[0] == "+" else "instance", taken[1:])
            lines.append(self.signature(method) + " __attribute__((unavailable));")
        return lines

    def in_order(self, table, names):
        """Names of one table, each after the ones of it that it needs."""
        done = []

        def visit(name):
            if name in done:
                return
            needs = table[name].get("inherits")
            for other in sorted(self.mentions(table[name]) if needs is None else needs):
                if other in table and other in names and other != name:
                    visit(other)
            done.append(name)

        for name in sorted(n for n in names if n in table):
            visit(name)
        return done

    def header(self, framework, chosen):
        def mine(table):
            names = {n for n in chosen if n in table and table[n].get("framework", "Metal") == framework}
            return [(n, table[n]) for n in self.in_order(table, names)]

        out = ["// Generated by make_headers.py from metal_api.json. Not an Apple header.", "#pragma once", ""]
        out += [f"#import <{path}>" for path in FRAMEWORKS[framework]]
        out += ["", "#ifndef __has_feature", "#define __has_feature(x) 0", "#endif", ""]

        if external := mine(self.external_types):
            apple = sorted({entry["apple_header"] for _, entry in external} - set(FRAMEWORKS[framework]))
            out += ["#ifdef __APPLE__", *(f"#import <{path}>" for path in apple), "#else"]
            out += [f"typedef {declare(entry['type'], name)};" for name, entry in external]
            out += ["#endif", ""]

        used = set()
        for table in self.tables:
            for name, entry in mine(table):
                used |= {name} | self.mentions(entry)
        used = {n for n in used if n.startswith(("MTL", "MPS"))}
        values = set(self.entries) - set(self.protocols) - set(self.classes)
        out += [f"@protocol {n};" for n in sorted(used & self.all_protocols)]
        out += [f"@class {n};" for n in sorted(used - self.all_protocols - values)] + [""]

        for name, entry in mine(self.enums):
            macro = "NS_OPTIONS" if entry["options"] else "NS_ENUM"
            out.append(f"typedef {macro}({entry['type']}, {name}) {{")
            for key, value in entry["values"].items():
                number = f"{value:#x}" if entry["options"] else value
                out.append(f"    {key}{self.marked(self.since['values'], key)} = {number}{'ULL' if value >= 2**63 else ''},")
            out += ["};", ""]
        for name, entry in mine(self.structs):
            fields = "".join(f"    {declare(f['type'], f['name'])};\n" for f in entry["fields"])
            out += [f"typedef struct {{\n{fields}}} {name};", ""]
        for name, entry in mine(self.typedefs):
            out.append(self.guarded(f"typedef {declare(entry['type'], name)};", entry["type"]))

        out += ["", "#ifdef __cplusplus", 'extern "C" {', "#endif"]
        for name, entry in mine(self.constants):
            if "value" in entry:
                number = f"{entry['value']:#x}" + ("ULL" if entry["value"] >= 2**63 else "")
                out.append(f"#define {name} (({entry['type']}){number})")
            else:
                out.append(f"extern {declare(entry['type'] + ' const', name)};")
        for name, entry in mine(self.functions):
            pairs = zip(entry["args"], entry.get("names", []), strict=False)
            text = declare(entry["returns"], name) + f"({', '.join(declare(*p) for p in pairs) or 'void'})"
            if "body" in entry:
                text = f"static inline {text} {{ {entry['body']} }}"
            else:
                retained = " __attribute__((ns_returns_retained))" if entry.get("returns_retained") else ""
                text = f"extern {text}{retained};"
            out.append(self.guarded(text, entry["returns"], *entry["args"]))
        out += ["#ifdef __cplusplus", "}", "#endif", ""]

        for name, entry in mine(self.protocols):
            mark = self.marked(self.since["types"], name).strip()
            out += [*filter(None, [mark]), f"@protocol {name} <{', '.join(entry['inherits'])}>", *self.members(entry, name), "@end", ""]
        for name, entry in mine(self.classes):
            conforms = f" <{', '.join(entry['conforms'])}>" if entry["conforms"] else ""
            # Where the fake keeps what it knows of an object: this runtime takes no instance variables from an @implementation.
            state = [] if entry["inherits"][0] in self.classes else ["{", "@public", "    void *fakeState;", "}"]
            mark = self.marked(self.since["types"], name).strip()
            out += [
                *filter(None, [mark]),
                f"@interface {name} : {entry['inherits'][0]}{conforms}",
                *state,
                *self.members(entry, name),
                "@end",
                "",
            ]
        return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path)
    parser.add_argument("outdir", type=Path)
    parser.add_argument("--only", type=lambda s: s.split(","), metavar="NAME,NAME...")
    parser.add_argument("--sdk", type=int, metavar="VERSION", help="of macOS")
    args = parser.parse_args()

    since = json.loads(args.facts.with_name("availability.json").read_text()) if args.sdk else None
    api = Api(json.loads(args.facts.read_text()), since, args.sdk)
    chosen = api.select(args.only)
    for framework in FRAMEWORKS:
        path = args.outdir / framework / f"{framework}.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = api.header(framework, chosen)
        if not path.exists() or path.read_text() != text:  # what includes it is compiled again
            path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
