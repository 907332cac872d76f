"""Grey pictures in a grid, as one PNG embedded in the page."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from html import escape

import torch
from torch import Tensor

PAGE = 1024  # screen pixels
GAP = 1  # pixels between two pictures; transparent, so that the page shows there, light or dark


def montage(pictures: Tensor, label: str, zoom: int = 2) -> str:
    """An <img> element that shows pictures, n x height x width, in rows as wide as the page.

    Values go from 0 (black) to 1 (white) and are clamped. `label` is the alternative text.
    """
    if pictures.ndim != 3 or not len(pictures):
        raise ValueError(f"pictures of shape {tuple(pictures.shape)}: take (number, height, width)")
    columns = max(1, PAGE // (zoom * (pictures.shape[2] + GAP)))
    grey, alpha = _tiled(pictures, columns)
    height, width = grey.shape
    content = base64.b64encode(png(grey, alpha)).decode()
    size = f'width="{width * zoom}" height="{height * zoom}"'
    return f'<img class="pixels" {size} alt="{escape(label)}" src="data:image/png;base64,{content}">'


def _tiled(pictures: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """All pictures in one, and its opacity; both as bytes."""
    number, height, width = pictures.shape
    columns = min(columns, number)
    rows = math.ceil(number / columns)
    high, wide = height + GAP, width + GAP
    grey = torch.zeros(rows * high - GAP, columns * wide - GAP, dtype=torch.uint8)
    alpha = torch.zeros_like(grey)
    shades = (pictures.detach().cpu().float().clamp(0, 1) * 255).round().to(torch.uint8)
    for i, picture in enumerate(shades):
        down, right = high * (i // columns), wide * (i % columns)
        grey[down : down + height, right : right + width] = picture
        alpha[down : down + height, right : right + width] = 255
    return grey, alpha


def png(grey: Tensor, alpha: Tensor) -> bytes:
    """A PNG file of grey pixels with their opacity, both matrices of bytes."""
    height, width = grey.shape
    pixels = torch.stack([grey, alpha], dim=2).reshape(height, 2 * width)
    lines = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), pixels], dim=1)  # filter 0 before each line
    header = struct.pack(">IIBBBBB", width, height, 8, 4, 0, 0, 0)  # 8 bits, grey and alpha, not interlaced
    body = zlib.compress(bytes(lines.flatten().tolist()), 9)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def signed(pictures: Tensor) -> Tensor:
    """Pictures of positive and negative values, each scaled by its largest, so that 0 is middle grey."""
    largest = pictures.abs().amax(dim=(1, 2), keepdim=True).clamp_min(1e-12)
    return 0.5 + 0.5 * pictures / largest
