"""The real model, for tests that need it."""

from pathlib import Path

import pytest

from lehr.core.errors import LehrError
from lehr.model.fetch import fetch


@pytest.fixture(scope="session")
def smollm() -> Path:
    try:
        return fetch("smollm2-135m")
    except LehrError as error:
        pytest.skip(str(error))
