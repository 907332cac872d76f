"""Variables are kept by name, and saved."""

from parts import vector
from shoal.engine.variables import Variables


def test_a_variable_is_a_copy_of_its_start_and_stays_the_same_tensor():
    variables, start = Variables(), vector(1.0)
    kept = variables.keep("velocity", start)
    kept.add_(1.0)
    assert start.item() == 1.0
    assert variables.keep("velocity", start) is kept


def test_what_was_saved_is_given_back_and_left_as_it_was():
    one, other = Variables(), Variables()
    one.keep("velocity", vector(3.0))
    other.load(one.state())
    other.keep("velocity", vector(0.0)).add_(1.0)
    assert other.keep("velocity", vector(0.0)).item() == 4.0
    assert one.keep("velocity", vector(0.0)).item() == 3.0


def test_what_was_saved_comes_back_on_the_device_that_the_algorithm_keeps_it_on():
    one, other = Variables(), Variables()
    one.keep("velocity", vector(3.0))
    one.keep("tally", vector(2.0))
    other.load(one.state())
    assert other.keep("velocity", vector(0.0).to("meta")).device.type == "meta"
    assert other.keep("tally", vector(0.0)).item() == 2.0


def test_shared_variables_are_those_that_were_declared_so():
    variables = Variables()
    variables.keep("momentum", vector(1.0), shared=True)
    variables.keep("own", vector(1.0))
    assert variables.shared().keys() == {"momentum"}
    variables.load(variables.state())
    variables.keep("own", vector(1.0))
    assert variables.shared().keys() == {"momentum"}
