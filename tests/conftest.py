"""What every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_settings_of_this_shell() -> Iterator[None]:
    """Tests must not see the settings or the state folder of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("SEALMESH_"):
                patch.delenv(name)
        yield
