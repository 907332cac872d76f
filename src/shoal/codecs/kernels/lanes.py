"""Lanes: sixteen elements at a time, for kernels in which no compiler finds them by itself.

What they can do is in `instructions`. Sixteen floats are four registers of an ARM, two of AVX2, one of
AVX-512. What numba keeps on disk of a kernel does not notice a change of these two files: `make clean` then.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

LANES = 16
SINGLE, WORD = ir.FloatType(), ir.IntType(32)


class Lanes(types.Type):
    """Sixteen floats, or sixteen words of 32 bits, in registers."""

    def __init__(self, name: str, element: Any) -> None:
        self.vector = ir.VectorType(element, LANES)
        super().__init__(name=name)


class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, kind.vector)  # type: ignore[no-untyped-call]


register_model(Lanes)(_Model)
FLOATS, WORDS = Lanes("sixteen floats", SINGLE), Lanes("sixteen words", WORD)
_LLVM = {FLOATS: FLOATS.vector, WORDS: WORDS.vector, types.float32: SINGLE, types.int32: WORD}


def op(result: Any, build: Callable[..., Any], count: int) -> Any:
    """What `build` makes of `count` arguments, which are lanes or numbers."""

    def typed(_: Any, *kinds: Any) -> Any:
        return result(*kinds), lambda context, builder, signature, values: build(builder, *values)

    return _intrinsic(typed, count)


def call(result: Any, name: str, count: int, *first: Any, **flags: Any) -> Any:
    """One of the functions that LLVM itself has for vectors."""

    def build(builder: Any, *values: Any) -> Any:
        kind = ir.FunctionType(_LLVM[result], [value.type for value in (*first, *values)])
        return builder.call(declared(builder.module, kind, name), (*first, *values), **flags)

    return op(result, build, count)


def declared(module: Any, kind: Any, name: str) -> Any:
    """That function, of which each module must hear once."""
    return module.globals.get(f"llvm.{name}") or ir.Function(module, kind, f"llvm.{name}")


def memory(result: Any, element: Any, build: Callable[..., Any], count: int = 0) -> Any:
    """What `build` makes of a place in an array, where sixteen elements begin, and of `count` lanes."""

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
    cast(Any, typed).__signature__ = Signature(names)  # numba wants to know how many
    return intrinsic(typed)
