"""What scripts are forks of: see tests/forking.py."""

import pytest
import scripts
from forking import Forker


@pytest.fixture(autouse=True, scope="session")
def forker():
    scripts.FORKER.append(Forker())
    yield
    scripts.FORKER.pop().close()
