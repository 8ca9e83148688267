import os

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Keep tests away from the user's cache, the environment's data and the network."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("ADADP_DATA", raising=False)
    monkeypatch.setenv("ADADP_OFFLINE", "1")
    return cache / "adadp"


REAL_DATA = os.environ.get("ADADP_DATA")


@pytest.fixture
def real_data(monkeypatch):
    """$ADADP_DATA with the published data sets in it; the test is skipped where it is not set."""
    if not REAL_DATA:
        pytest.skip("ADADP_DATA is not set: no real data sets to read")
    monkeypatch.setenv("ADADP_DATA", REAL_DATA)
    return REAL_DATA
