"""One of two floats or words in each lane: the second argument where the first is so, the third elsewhere."""

from __future__ import annotations

from typing import Any

from shoal.codecs.kernels.instructions import ZEROS, fence
from shoal.codecs.kernels.lanes import FLOATS, WORDS, op


def _where_below(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.select(builder.icmp_signed("<", x, ZEROS), y, z)


def _where_number(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.select(builder.fcmp_ordered("ord", x, x), y, z)


def _where_any(builder: Any, x: Any, y: Any, z: Any) -> Any:
    some = builder.sext(builder.icmp_signed("!=", x, ZEROS), WORDS.vector)
    mask = fence(builder, some)  # else LLVM asks whether there is none, which takes ARM one instruction more
    y, z = builder.bitcast(y, WORDS.vector), builder.bitcast(z, WORDS.vector)
    chosen = builder.or_(builder.and_(mask, y), builder.and_(builder.not_(mask), z))
    return builder.bitcast(chosen, FLOATS.vector)


where_below = op(FLOATS, _where_below, 3)  # a word is below 0
where_number = op(WORDS, _where_number, 3)  # a float is a number
where_any = op(FLOATS, _where_any, 3)  # a word has any bit set
