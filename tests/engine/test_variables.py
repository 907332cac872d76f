"""Variables are kept by name, and saved."""

import torch

from parts import vector
from shoal.engine.variables import Variables


def test_a_variable_is_a_copy_of_its_start_and_stays_the_same_tensor():
    variables, start = Variables(torch.device("cpu")), vector(1.0)
    kept = variables.keep("velocity", start)
    kept.add_(1.0)
    assert start.item() == 1.0
    assert variables.keep("velocity", start) is kept


def test_what_was_saved_is_given_back_and_left_as_it_was():
    one, other = Variables(torch.device("cpu")), Variables(torch.device("cpu"))
    one.keep("velocity", vector(3.0))
    other.load(one.state())
    other.keep("velocity", vector(0.0)).add_(1.0)
    assert other.keep("velocity", vector(0.0)).item() == 4.0
    assert one.keep("velocity", vector(0.0)).item() == 3.0
