"""PROFILE: a machine that nobody has measured, under the name of this one."""

import platform

from shoal.sim.hardware import Handling, Profile, Speeds, Wiring

WIRING = Wiring(Handling(5e-5, 1e-9), Handling(5e-5, 1e-9), 1e-4, 1e9)
PROFILE = Profile(
    platform.node(),
    2,
    (1.0, 1.2),
    Handling(1e-6, 1e-10),
    {"grpc": WIRING, "processes": WIRING},
    {"grpc": WIRING, "processes": WIRING},
    {"one_bit": Speeds(1e-9, 1e-9)},
)
