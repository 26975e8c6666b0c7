"""The small models, offered to the tests by name of family."""

import pytest

from tests.models import tiny


@pytest.fixture(params=tiny.FAMILIES)
def make_config(request):
    return tiny.FAMILIES[request.param]
