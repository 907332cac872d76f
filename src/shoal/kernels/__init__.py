"""How kernels are compiled and chosen; the kernels are beside the PyTorch code that they replace."""
