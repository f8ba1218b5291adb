"""``metalmm sizes`` and ``--model``: the matmuls of a model, of its .gguf file, of a config.json of Hugging Face, or of a name in a list."""

from __future__ import annotations

import argparse
import collections
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import MatmulSpec, files, gguf_file
from ..errors import ArgumentError, DTypeError, Error, ShapeError
from ..gguf_blocks import GGUF
from ..variant import OPERAND_TYPES, STORAGES, kind_of
from .sizes import LeftOut, Sizes, give, is_count, of_spec, text_of

LIST = Path(__file__).with_name("models.json")
MARK = "# Matmuls of a model"
ARGUMENTS = ("model", "m", "context", "storage", "type")
_FUSED_ROWS = 8  # what fused variants take on every device, whatever the weights
_DRAFT_ROWS = 16  # of more rows, which are a prompt, the last one alone meets the vocabulary


class ModelError(Error, ValueError):
    """A model that cannot be read, or is of a kind that is not known."""


@dataclass(frozen=True)
class Matrix:
    """n rows of k weights.

    Attributes:
        storage: As QuantizedArray.storage says, or the name of a format that no variant takes. None is as asked for.
        dtype: Of dense weights. None is as asked for.
        name: Of its tensor in the file.
    """

    n: int
    k: int
    bias: bool = False
    storage: str | None = None
    dtype: str | None = None
    name: str = ""


@dataclass(frozen=True)
class Group:
    """What one A is multiplied by. swiglu: of two, what follows."""

    matrices: tuple[Matrix, ...]
    swiglu: bool = False
    is_head: bool = False  # the projection to the vocabulary


@dataclass
class Model:
    """Its groups, each with how often a token meets it."""

    name: str
    groups: list[tuple[Group, int]]
    layers: int
    heads: int
    head_dim: int
    value_dim: int
    alpha: float  # of attention's scores
    left_out: list[LeftOut] = field(default_factory=list)

    def sizes(self, rows: Sequence[int] = (1,), context: int = 1024, storage: str = "dense", dtype: str = "float16") -> Sizes:
        """Of a pass over each number of rows of one sequence: the weights' matmuls and, of each layer, the scores' and the values' of
        `context` tokens."""
        counts: collections.Counter[MatmulSpec] = collections.Counter()
        found = Sizes(left_out=list(self.left_out), steps=1)
        for m in dict.fromkeys(rows):
            for group, count in self.groups:
                for matrices in _together(group, m, storage, dtype):
                    first = matrices[0]
                    options = {"bias": first.bias, "dtype": first.dtype or dtype, "b_storage": first.storage or storage}
                    height = 1 if group.is_head and m > _DRAFT_ROWS else m
                    also = [x.n for x in matrices[1:]]
                    spec = self._add(
                        counts, found, count, height, first.n, first.k, also_n=also, swiglu=bool(also) and group.swiglu, **options
                    )
                    if spec is not None and first.name:
                        found.tensors.setdefault(spec, []).append(tuple(x.name for x in matrices))
            scores = {"batch": self.heads, "dtype": dtype}
            self._add(counts, found, self.layers, m, context, self.head_dim, alpha=self.alpha, **scores)
            self._add(counts, found, self.layers, m, self.value_dim, context, transpose_b=False, **scores)
        found.shapes = [of_spec(spec, calls) for spec, calls in counts.items()]
        return found

    @staticmethod
    def _add(
        counts: collections.Counter[MatmulSpec], found: Sizes, calls: int, m: int, n: int, k: int, **options: Any
    ) -> MatmulSpec | None:
        text = f"m={m} n={'+'.join(map(str, (n, *options.get('also_n', ()))))} k={k} {options.get('b_storage', 'dense')}"
        stored = options.get("b_storage", "dense")
        if kind_of(stored) not in STORAGES:
            found.left_out.append(LeftOut(text, f"no variant takes weights of format {stored}", calls))
            return None
        try:
            spec = MatmulSpec(m, n, k, **{"transpose_b": True, **options})
        except (ArgumentError, ShapeError, DTypeError) as error:
            found.left_out.append(LeftOut(text, str(error), calls))
            return None
        counts[spec] += calls
        return spec


def _together(group: Group, m: int, storage: str, dtype: str) -> Iterable[list[Matrix]]:
    """Its matrices as calls take them: of one format, type and bias in one call, where that takes so many rows."""
    kinds: dict[tuple[Any, ...], list[Matrix]] = {}
    for i, x in enumerate(group.matrices):
        kinds.setdefault((x.storage or storage, x.dtype or dtype, x.bias, i if m > _FUSED_ROWS else 0), []).append(x)
    return kinds.values()


@functools.cache
def _listed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(LIST.read_text(encoding="utf-8"))
    return found


def load(model: str) -> Model:
    """Of a .gguf file, a config.json or a name of the list. Raises ModelError, and what gguf_file.check does."""
    path, listed = Path(model), _listed()
    if path.suffix.lower() == ".gguf":
        return _of_gguf(path)
    if path.suffix.lower() == ".json":
        if path.exists() and not path.is_file():  # a FIFO would wait for whoever writes to it
            raise ModelError(f"{path} is no plain file")
        try:
            config = json.loads(path.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        return of_config(config, str(path))
    names = {name.lower(): name for name in listed}
    if name := names.get(model.lower()):
        return of_config(listed[name], name)
    raise ModelError(f"{model!r} is no model; it takes a .gguf file, a config.json or one of {', '.join(listed)}")


# What the kinds of config.json have: biases of q, k and v; of all; matrices that are one in the checkpoint; no gate; a width of heads
# that must be said; another activation where none is said; biases whatever attention_bias says.
_KINDS: Mapping[str, frozenset[str]] = {
    "llama": frozenset(),
    "mistral": frozenset({"no bias"}),
    "qwen2": frozenset({"qkv bias"}),
    "qwen3": frozenset({"head_dim"}),
    "gemma": frozenset({"head_dim", "gelu"}),
    "gemma2": frozenset({"head_dim", "gelu"}),
    "gemma3_text": frozenset({"head_dim", "gelu"}),
    "phi": frozenset({"bias", "no gate", "gelu"}),
    "phi3": frozenset({"joined", "no bias"}),
    "mixtral": frozenset({"no bias"}),
    "qwen2_moe": frozenset({"qkv bias"}),
    "qwen3_moe": frozenset({"head_dim"}),
}
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _number(model: object, key: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value < 2**31:
        raise ModelError(f"{model}: {key} is {str(value)[:40]!r}; it takes a whole number from 1 to 2^31 - 1")
    return value


def of_config(config: Any, name: str) -> Model:
    """Of what a config.json says. Raises ModelError."""
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):  # of one that sees, too
        config = config["text_config"]
    if not isinstance(config, dict):
        raise ModelError(f"{name}: a config.json is an object, with {', '.join(_NEEDED)}")
    kind = str(config.get("model_type"))
    has = _KINDS.get(kind, frozenset())
    missing = [key for key in (*_NEEDED, *(["head_dim"] if "head_dim" in has else [])) if key not in config]
    if kind not in _KINDS:
        lacks = f", and it has no {', '.join(missing)}" if missing else ""
        raise ModelError(f"{name}: model_type is {kind[:40]!r}{lacks}; known are {', '.join(_KINDS)}")
    if missing:
        raise ModelError(f"{name}: it has no {', '.join(missing)}")

    def number(key: str, otherwise: int | None = None) -> int:
        value = config.get(key)
        return _number(name, key, otherwise if value is None and otherwise is not None else value)

    hidden, layers, heads, ffn, vocab = (number(key) for key in _NEEDED)
    of_k, head_dim = number("num_key_value_heads", heads), number("head_dim", max(1, hidden // heads))
    if heads % of_k or (config.get("head_dim") is None and hidden % heads):
        raise ModelError(
            f"{name}: num_attention_heads is {heads}; it must be a multiple of num_key_value_heads, {of_k}, and without head_dim divide"
            f" hidden_size, {hidden}"
        )
    bias = "bias" in has or (config.get("attention_bias") is True and "no bias" not in has)
    q = [Matrix(n, hidden, bias or "qkv bias" in has) for n in (heads * head_dim, of_k * head_dim, of_k * head_dim)]
    up = [Matrix(ffn, hidden, config.get("mlp_bias") is True or "bias" in has)] * (1 if "no gate" in has else 2)
    if "joined" in has:
        q, up = ([Matrix(sum(x.n for x in parts), hidden, parts[0].bias)] for parts in (q, up))
    act = config.get("hidden_activation") or config.get("hidden_act") or ("gelu" if "gelu" in has else "silu")
    groups = [
        (Group(tuple(q)), layers),
        (Group((Matrix(hidden, heads * head_dim, bias),)), layers),
        (Group(tuple(up), swiglu=act in ("silu", "swish") and len(up) == 2 and not up[0].bias), layers),
        (Group((Matrix(hidden, ffn, up[0].bias),)), layers),
        (Group((Matrix(vocab, hidden, "bias" in has),), is_head=True), 1),
    ]
    left = []
    if any(config.get(key) for key in _EXPERTS):
        del groups[2:4]
        left = [LeftOut("the feed-forward part of each layer", "experts are not run", layers)]
    scale = number("query_pre_attn_scalar", head_dim)
    return Model(name, groups, layers, heads, head_dim, head_dim, scale**-0.5, left)


_LAYER = re.compile(r"blk\.(\d+)\.")
# Of a layer, by its input. What else has two dimensions or more is listed as not run, but for the table of embeddings.
_GROUPS = (("attn_q", "attn_k", "attn_v"), ("attn_qkv",), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",))
_DENSE = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


def _of_gguf(path: Path) -> Model:
    reader = gguf_file.read(path, "a .gguf file")
    try:
        said = {key: value.contents() for key, value in reader.fields.items()}
    except Exception as error:  # texts that are none, say
        raise ModelError(f"{path}: {error}") from error
    tensors = {t.name: ([int(x) for x in t.shape], t.tensor_type.name.lower()) for t in reader.tensors}
    kind = said.get("general.architecture")

    def number(key: str, otherwise: int | None = None) -> int:
        value = said.get(f"{kind}.{key}", otherwise)
        return _number(path, f"{kind}.{key}", max(value) if isinstance(value, list) and value else value)  # of each layer

    layers, heads = number("block_count"), number("attention.head_count")
    head_dim = number("attention.key_length", max(1, number("embedding_length") // heads))
    there = {int(found[1]) for name in tensors if (found := _LAYER.match(name))}
    if len(there) != layers or max(there) != layers - 1:
        raise ModelError(
            f"{path}: {kind}.block_count is {layers}, and it has tensors of {len(there)} layers; of a file in parts, join them first"
        )
    groups: list[tuple[Group, int]] = []
    taken = {"token_embd.weight"}

    def matrix(name: str) -> Matrix:
        (k, n), form = tensors[name]
        taken.add(name)
        bias = f"{name.removesuffix('weight')}bias" in tensors
        stored = GGUF[form].storage if form in GGUF else form
        return Matrix(n, k, bias, "dense" if form in _DENSE else stored, _DENSE.get(form), name)

    def is_matrix(name: str) -> bool:
        return name in tensors and len(tensors[name][0]) == 2

    silu = kind not in ("gemma", "gemma2", "gemma3", "phi2")
    for i in range(layers):
        for names in _GROUPS:
            if parts := [f"blk.{i}.{name}.weight" for name in names if is_matrix(f"blk.{i}.{name}.weight")]:
                group = tuple(map(matrix, parts))
                groups.append((Group(group, swiglu=names[-1] == "ffn_up" and silu and len(group) == 2 and not group[0].bias), 1))
    head = next((name for name in ("output.weight", "token_embd.weight") if is_matrix(name)), None)
    if head:
        groups.append((Group((matrix(head),), is_head=True), 1))
    others = collections.Counter(_LAYER.sub("", name) for name, (shape, _) in tensors.items() if name not in taken and len(shape) > 1)
    left = [
        LeftOut(name, "experts are not run" if name.endswith("_exps.weight") else "what it is for is not known", count)
        for name, count in others.items()
    ]
    value_dim = number("attention.value_length", head_dim)
    return Model(path.name, groups, layers, heads, head_dim, value_dim, head_dim**-0.5, left)


def add_model_arguments(parser: argparse.ArgumentParser, *, needs: bool = False) -> None:
    """A model, and how it is run."""
    what = f"a .gguf file, a config.json of Hugging Face or a name: {', '.join(_listed())}"
    if needs:
        parser.add_argument("model", metavar="MODEL", help=what)
    else:
        parser.add_argument("--model", help=f"its shapes instead: {what}")
    parser.add_argument("--m", help="rows of the model's operands, such as 1,4,16,512 (default: 1)")
    parser.add_argument("--context", type=int, help="tokens that attention sees (default: 1024)")
    parser.add_argument("--storage", help="of the model's weights, where it does not say: dense, q8_0, q4_0, affine4 … (default: dense)")
    parser.add_argument("--type", choices=OPERAND_TYPES, help="of the model's operands, where it does not say (default: float16)")


def sizes_of(args: argparse.Namespace) -> Sizes | None:
    """What the arguments say; None where they name no model. Raises ModelError."""
    if args.model is None:
        if alone := [f"--{key}" for key in ARGUMENTS if getattr(args, key) is not None]:
            raise ModelError(f"{alone[0]} is of a model; name one with --model")
        return None
    rows, context = ("1" if args.m is None else args.m).split(","), 1024 if args.context is None else args.context
    storage = "dense" if args.storage is None else args.storage
    if not all(is_count(m.strip()) for m in rows):
        raise ModelError(f"--m {args.m[:40]!r}: it takes whole numbers from 1 on, such as 1,4,16")
    if not 1 <= context < 2**31:
        raise ModelError(f"--context {context}: it takes 1 to 2^31 - 1")
    try:
        MatmulSpec(1, 1 << 12, 1 << 12, transpose_b=True, b_storage=storage)
    except (ArgumentError, ShapeError):
        raise ModelError(f"--storage {storage[:40]!r}: it takes one of {', '.join(STORAGES)}") from None
    return load(args.model).sizes([int(m) for m in rows], context, storage, args.type or "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, needs=True)
    parser.add_argument("-o", "--output", metavar="FILE", help="the sizes file; default: standard output")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    if args.output:
        files.check_output(Path(args.output), MARK, "sizes file")
    found = sizes_of(args)
    assert found  # the model is no option here
    if not found.shapes:
        raise ModelError("\n".join([f"{args.model}: there is no shape that can be run", *found.left_out_lines()]))
    notes = "".join(f"# {line}\n" for line in found.left_out_lines())
    give(args, found, f"{MARK}: {files.harmless(args.model)}\n{notes}\n{text_of(found.shapes)}", "metalmm sizes")
    return 0
