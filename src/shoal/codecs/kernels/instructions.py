"""What can be done with lanes: each is one instruction of LLVM, or two.

Nothing is checked: who loads and stores stays inside the array. What is not a number comes out as such of all
that reckons with floats.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from shoal.codecs.kernels.lanes import FLOATS, LANES, SINGLE, WORD, WORDS, call, declared, memory, op

ZEROS = ir.Constant(WORDS.vector, [0] * LANES)
HALF = ir.HalfType()


def _splat(builder: Any, value: Any) -> Any:
    none = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(none, value, ir.Constant(WORD, 0)), none, ZEROS)


def _prefetch(builder: Any, place: Any) -> Any:
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, WORD, WORD, WORD])
    function = declared(builder.module, kind, "prefetch.p0")
    builder.call(function, [builder.bitcast(place, byte), WORD(0), WORD(3), WORD(1)])


def _store(builder: Any, place: Any, value: Any) -> Any:
    builder.store(value, place, align=4)


def _store_halves(builder: Any, place: Any, value: Any) -> Any:
    builder.store(builder.fptrunc(value, ir.VectorType(HALF, LANES)), place, align=2)


def _store_upper(builder: Any, place: Any, value: Any) -> Any:
    upper = builder.lshr(value, ir.Constant(WORDS.vector, [16] * LANES))
    builder.store(builder.trunc(upper, ir.VectorType(ir.IntType(16), LANES)), place, align=2)


def fence(builder: Any, x: Any) -> Any:
    """What LLVM does not look behind for a way that it takes for shorter."""
    kind = ir.FunctionType(FLOATS.vector, [FLOATS.vector])
    function = declared(builder.module, kind, "arithmetic.fence.v16f32")
    return builder.bitcast(builder.call(function, [builder.bitcast(x, FLOATS.vector)]), WORDS.vector)


# An array and the index of the first of sixteen elements.
load = memory(FLOATS, SINGLE, lambda builder, place: builder.load(place, align=4))
load_words = memory(WORDS, WORD, lambda builder, place: builder.load(place, align=4))
load_halves = memory(FLOATS, HALF, lambda b, place: b.fpext(b.load(place, align=2), FLOATS.vector))
store = memory(types.void, SINGLE, _store, 1)
store_words = memory(types.void, WORD, _store, 1)
store_halves = memory(types.void, HALF, _store_halves, 1)
store_upper = memory(types.void, ir.IntType(16), _store_upper, 1)  # the upper halves of words
prefetch = memory(types.void, SINGLE, _prefetch)  # what is needed soon; harmless where no such memory is

# Of floats.
splat = op(FLOATS, _splat, 1)
add = op(FLOATS, lambda builder, x, y: builder.fadd(x, y), 2)
sub = op(FLOATS, lambda builder, x, y: builder.fsub(x, y), 2)
mul = op(FLOATS, lambda builder, x, y: builder.fmul(x, y), 2)
mul_add = call(FLOATS, "fma.v16f32", 3)  # x * y + z, rounded once
signed_as = call(FLOATS, "copysign.v16f32", 2)  # x with the sign of y
lesser = call(FLOATS, "minimum.v16f32", 2)
greater = call(FLOATS, "maximum.v16f32", 2)
total = call(types.float32, "vector.reduce.fadd.v16f32", 1, SINGLE(0.0), fastmath=("reassoc",))
bits = op(WORDS, lambda builder, x: builder.bitcast(x, WORDS.vector), 1)

# Of words.
splat_word = op(WORDS, _splat, 1)
both = op(WORDS, lambda builder, x, y: builder.and_(x, y), 2)
either = op(WORDS, lambda builder, x, y: builder.or_(x, y), 2)
differ = op(WORDS, lambda builder, x, y: builder.xor(x, y), 2)
flip = op(WORDS, lambda builder, x: builder.not_(x), 1)
up = op(WORDS, lambda builder, x, by: builder.shl(x, by), 2)
down = op(WORDS, lambda builder, x, by: builder.lshr(x, by), 2)
plus = op(WORDS, lambda builder, x, y: builder.add(x, y), 2)
fixed = op(WORDS, fence, 1)  # the same
larger = call(WORDS, "smax.v16i32", 2)
largest = call(types.int32, "vector.reduce.smax.v16i32", 1)
ones = call(WORDS, "ctpop.v16i32", 1)
sum_words = call(types.int32, "vector.reduce.add.v16i32", 1)
floats = op(FLOATS, lambda builder, x: builder.bitcast(x, FLOATS.vector), 1)  # that have these bits
