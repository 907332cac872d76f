"""Lanes: sixteen float32 or int32 in vector registers, for kernels that LLVM does not vectorise by itself.

Sixteen floats fill four registers of ARM NEON, two of AVX2 or one of AVX-512. Each operation below is one or
two LLVM instructions. Nothing is checked: the caller keeps loads and stores inside the array. NaN propagates.
docs/codecs.md says why kernels use lanes instead of plain Numba loops.

Numba's disk cache does not notice a change of this file: run `make clean` after one.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

LANES = 16
SINGLE, WORD, HALF = ir.FloatType(), ir.IntType(32), ir.HalfType()


class Lanes(types.Type):
    """The Numba type of sixteen floats, or of sixteen 32-bit words, in registers."""

    def __init__(self, name: str, element: Any) -> None:
        self.vector = ir.VectorType(element, LANES)
        super().__init__(name=name)


class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, kind.vector)  # type: ignore[no-untyped-call]


register_model(Lanes)(_Model)
FLOATS, WORDS = Lanes("sixteen floats", SINGLE), Lanes("sixteen words", WORD)
ZEROS = ir.Constant(WORDS.vector, [0] * LANES)
_LLVM = {FLOATS: FLOATS.vector, WORDS: WORDS.vector, types.float32: SINGLE, types.int32: WORD}


# ---------------------------------------------------------------------- how an operation is given to Numba


def _op(result: Any, build: Callable[..., Any], count: int) -> Any:
    """The operation that `build` emits for `count` arguments, which are lanes or scalars."""

    def typed(_: Any, *kinds: Any) -> Any:
        return result(*kinds), lambda context, builder, signature, values: build(builder, *values)

    return _intrinsic(typed, count)


def _call(result: Any, name: str, count: int, *first: Any, **flags: Any) -> Any:
    """A call of one of LLVM's own functions on vectors."""

    def build(builder: Any, *values: Any) -> Any:
        kind = ir.FunctionType(_LLVM[result], [value.type for value in (*first, *values)])
        return builder.call(_declared(builder.module, kind, name), (*first, *values), **flags)

    return _op(result, build, count)


def _memory(result: Any, element: Any, build: Callable[..., Any], count: int = 0) -> Any:
    """What `build` emits for an array, the index of the first of sixteen elements, and `count` lanes."""

    def typed(_: Any, array: Any, at: Any, *kinds: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            data = context.make_array(array)(context, builder, values[0]).data
            vector = ir.VectorType(element, LANES).as_pointer()
            made = build(builder, builder.bitcast(builder.gep(data, [values[1]]), vector), *values[2:])
            return context.get_dummy_value() if made is None else made

        return result(array, types.intp, *kinds), generate

    return _intrinsic(typed, 2 + count)


def _intrinsic(typed: Callable[..., Any], count: int) -> Any:
    names = [Parameter(f"x{number}", Parameter.POSITIONAL_OR_KEYWORD) for number in range(1 + count)]
    cast(Any, typed).__signature__ = Signature(names)  # Numba reads the number of arguments from it
    return intrinsic(typed)


def _declared(module: Any, kind: Any, name: str) -> Any:
    """LLVM's function of that name; a module declares each once."""
    return module.globals.get(f"llvm.{name}") or ir.Function(module, kind, f"llvm.{name}")


# ------------------------------------------------------------------- operations of more than one instruction


def _splat(builder: Any, value: Any) -> Any:
    none = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(none, value, ir.Constant(WORD, 0)), none, ZEROS)


def _prefetch(builder: Any, place: Any) -> Any:
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, WORD, WORD, WORD])
    function = _declared(builder.module, kind, "prefetch.p0")
    builder.call(function, [builder.bitcast(place, byte), WORD(0), WORD(3), WORD(1)])


def _store(builder: Any, place: Any, value: Any) -> Any:
    builder.store(value, place, align=4)


def _store_halves(builder: Any, place: Any, value: Any) -> Any:
    builder.store(builder.fptrunc(value, ir.VectorType(HALF, LANES)), place, align=2)


def _fence(builder: Any, x: Any) -> Any:
    """`x`, hidden from LLVM's optimiser, which would rewrite the code around it into something slower."""
    kind = ir.FunctionType(FLOATS.vector, [FLOATS.vector])
    function = _declared(builder.module, kind, "arithmetic.fence.v16f32")
    return builder.bitcast(builder.call(function, [builder.bitcast(x, FLOATS.vector)]), WORDS.vector)


def _where_below(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.select(builder.icmp_signed("<", x, ZEROS), y, z)


def _where_any(builder: Any, x: Any, y: Any, z: Any) -> Any:
    some = builder.sext(builder.icmp_signed("!=", x, ZEROS), WORDS.vector)
    mask = _fence(builder, some)  # else LLVM inverts the comparison, one instruction more on ARM
    y, z = builder.bitcast(y, WORDS.vector), builder.bitcast(z, WORDS.vector)
    chosen = builder.or_(builder.and_(mask, y), builder.and_(builder.not_(mask), z))
    return builder.bitcast(chosen, FLOATS.vector)


# ------------------------------------------------------------------------------- what kernels may call

# Memory: an array, and the index of the first of sixteen elements.
load = _memory(FLOATS, SINGLE, lambda builder, place: builder.load(place, align=4))
load_words = _memory(WORDS, WORD, lambda builder, place: builder.load(place, align=4))
load_halves = _memory(FLOATS, HALF, lambda b, place: b.fpext(b.load(place, align=2), FLOATS.vector))
store = _memory(types.void, SINGLE, _store, 1)
store_words = _memory(types.void, WORD, _store, 1)
store_halves = _memory(types.void, HALF, _store_halves, 1)
prefetch = _memory(types.void, SINGLE, _prefetch)  # harmless beyond the end of the array

# Floats.
splat = _op(FLOATS, _splat, 1)
add = _op(FLOATS, lambda builder, x, y: builder.fadd(x, y), 2)
sub = _op(FLOATS, lambda builder, x, y: builder.fsub(x, y), 2)
mul = _op(FLOATS, lambda builder, x, y: builder.fmul(x, y), 2)
mul_add = _call(FLOATS, "fma.v16f32", 3)  # x * y + z, rounded once
signed_as = _call(FLOATS, "copysign.v16f32", 2)  # x with the sign of y
lesser = _call(FLOATS, "minimum.v16f32", 2)
greater = _call(FLOATS, "maximum.v16f32", 2)
total = _call(types.float32, "vector.reduce.fadd.v16f32", 1, SINGLE(0.0), fastmath=("reassoc",))
bits = _op(WORDS, lambda builder, x: builder.bitcast(x, WORDS.vector), 1)

# Words.
splat_word = _op(WORDS, _splat, 1)
both = _op(WORDS, lambda builder, x, y: builder.and_(x, y), 2)
either = _op(WORDS, lambda builder, x, y: builder.or_(x, y), 2)
differ = _op(WORDS, lambda builder, x, y: builder.xor(x, y), 2)
flip = _op(WORDS, lambda builder, x: builder.not_(x), 1)
up = _op(WORDS, lambda builder, x, by: builder.shl(x, by), 2)
down = _op(WORDS, lambda builder, x, by: builder.lshr(x, by), 2)
fixed = _op(WORDS, _fence, 1)  # the same words, as `_fence` says
larger = _call(WORDS, "smax.v16i32", 2)
largest = _call(types.int32, "vector.reduce.smax.v16i32", 1)
ones = _call(WORDS, "ctpop.v16i32", 1)
sum_words = _call(types.int32, "vector.reduce.add.v16i32", 1)
floats = _op(FLOATS, lambda builder, x: builder.bitcast(x, FLOATS.vector), 1)  # with these bits

# Choices: in each lane the second argument where the first qualifies, the third elsewhere.
where_below = _op(FLOATS, _where_below, 3)  # a word is below 0
where_any = _op(FLOATS, _where_any, 3)  # a word has a bit set
