"""PowerSGD: a matrix as the product of two thin ones."""
