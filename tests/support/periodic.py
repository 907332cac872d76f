"""PERIODIC: the strategies that exchange every `period` steps, whose default is too long for short tests."""

PERIODIC = (
    "local",
    "post_local",
    "bmuf",
    "slowmo",
    "diloco",
    "async_diloco",
    "muloco",
    "noloco",
    "easgd",
    "eamsgd",
)
