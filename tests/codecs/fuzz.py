"""Give codecs payloads that were tampered with, sealed again so that the checksum does not show it.

    python tests/codecs/fuzz.py WORD,WORD [PAYLOADS]

Each must come back as a vector of the right length or be refused as a WireError: anything else ends this
process, whose memory is limited so that no length in a payload can make it grow.
"""

import random
import resource
import sys
from itertools import chain
from pathlib import Path

import torch

from shoal.codecs import CODECS
from shoal.codecs.wire import HEADER, seal
from shoal.core.errors import WireError
from shoal.core.transport import DTYPES
from shoal.core.vector import Layout

SPARE_BYTES = 1 << 29
LAYOUT = Layout(("a.weight", "a.bias", "b.weight"), tuple(map(torch.Size, ((13, 17), (13,), (9, 13)))))


def payloads(word, chance):
    """Honest ones to begin with: of several lengths, dense and nearly empty, with layers and without."""
    made = []
    for length in (0, 1, 5, 64, 300, 1029):
        for scale in (1.0, 0.0):
            codec = CODECS.make(word).fit(())
            v = torch.randn(length, generator=chance) * scale
            made.append((codec, length, codec.encode(v, codec.init(v))[0]))
    codec = CODECS.make(word).fit(LAYOUT.pieces(0, LAYOUT.numel))
    v = torch.randn(LAYOUT.numel, generator=chance)
    made.append((codec, LAYOUT.numel, codec.encode(v, codec.init(v))[0]))
    made.append((codec.merged, LAYOUT.numel, codec.merged.encode(v, codec.merged.init(v))[0]))
    return made


def tampered(payload, draw):
    """The payload with one thing or several wrong."""
    header, *bodies = [part.clone() for part in payload]
    _, _, code, _, elements, count, _ = HEADER.unpack(bytes(header.tolist()))
    for _ in range(draw.choice((1, 1, 2, 5))):
        what = draw.randrange(8)
        number = draw.randrange(len(bodies)) if bodies else -1
        if what == 0:
            count = draw.choice((0, 1, count + 1, max(0, count - 1), elements, 2**31, 2**63 - 1, 2**64 - 1))
        elif what == 1 and number >= 0:
            bodies[number] = bodies[number][: draw.randrange(len(bodies[number]) + 1)]
        elif what == 2 and number >= 0:
            bodies[number] = torch.cat([bodies[number], bodies[number][: draw.randrange(9)]])
        elif what == 3 and number >= 0:
            bodies[number] = bodies[number].to(draw.choice(DTYPES))
        elif what == 4 and bodies:
            bodies.pop(number)
        elif what == 5:
            bodies.append(torch.zeros(draw.randrange(20), dtype=draw.choice(DTYPES)))
        elif number >= 0 and len(bodies[number]):
            raw = bodies[number].view(torch.uint8)
            for _ in range(draw.choice((1, 2, 16))):
                raw[draw.randrange(len(raw))] = draw.choice((0, 255, 128, draw.randrange(256)))
    if draw.random() < 0.1:
        header[draw.randrange(len(header))] = draw.randrange(256)
        return (header, *bodies)
    if draw.random() < 0.1:
        elements = draw.choice((0, 1, elements + 1, 2**31, 2**62))
    return seal(code, elements, count % 2**64, *bodies[:3])


def main(words, number):
    honest = {word: payloads(word, torch.Generator().manual_seed(0)) for word in words}
    for codec, length, payload in chain(*honest.values()):  # compiles and caches before memory is limited
        codec.decode(payload, torch.empty(length))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))
    for word in words:
        print(f"{word}: {number} tampered payloads,", end=" ", flush=True)
        print(f"{refused(honest[word], random.Random(word), number)} refused", flush=True)


def refused(honest, draw, number):
    """How many of so many tampered payloads were."""
    count = 0
    for _ in range(number):
        codec, length, payload = draw.choice(honest)
        try:
            out = codec.decode(tampered(payload, draw), torch.empty(length))
        except WireError:
            count += 1
        else:
            assert out.shape == (length,), (codec, out.shape, length)
    return count


if __name__ == "__main__":
    main(sys.argv[1].split(","), int(sys.argv[2]) if len(sys.argv) > 2 else 20_000)
