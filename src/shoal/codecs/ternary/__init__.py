"""TernGrad: -1, 0 or 1 times the scale of a block."""
