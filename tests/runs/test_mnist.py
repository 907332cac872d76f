"""What block momentum is for: averaging loses accuracy as workers are added, and BMUF gets it back."""

import pytest

import shoal
from shoal.programs.tasks import data, images


def mnist_is_here() -> bool:
    try:
        data.find(images.MNIST)
    except shoal.DataMissing:
        return False
    return True


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_bmuf_restores_what_plain_averaging_loses_on_eight_workers(monkeypatch):
    monkeypatch.setenv("SHOAL_OFFLINE", "1")
    if not mnist_is_here():
        pytest.skip("MNIST is not on this machine; set SHOAL_DATA")
    settings = {"epochs": 4, "batch": 64, "seed": 0, "transport": "sim"}
    single = shoal.run("mnist", "single", **settings).test_accuracy
    averaging = shoal.run("mnist", shoal.Local(period=8), workers=8, **settings).test_accuracy
    bmuf = shoal.run("mnist", shoal.BMUF(period=8), workers=8, **settings).test_accuracy
    assert bmuf >= averaging + 1.0
    assert bmuf >= single - 1.0
