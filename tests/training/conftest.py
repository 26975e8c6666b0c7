import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "slow: compiles, which takes half a minute on two cores; leave out: -m 'not slow'"
    )
