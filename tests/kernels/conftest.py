"""The ops that a twin test looks at, see twins.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import twins


@pytest.fixture(scope="session")
def ops() -> SimpleNamespace:
    return twins.implementations()
