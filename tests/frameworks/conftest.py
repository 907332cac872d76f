"""What tests of several frameworks need."""

from __future__ import annotations

import pytest

from shoal.launch.environment import Place


@pytest.fixture
def two_workers(monkeypatch):
    """This process believes that it is one of two workers; it does not come to meet the other."""

    def launched(rank=0, **settings):
        (name, value), *_ = Place(rank, 2, launched="shoal", **settings).to_environment().items()
        monkeypatch.setenv(name, value)

    launched()
    monkeypatch.setattr("shoal.api.attach._was_launched", False)  # and afterwards as before
    return launched
