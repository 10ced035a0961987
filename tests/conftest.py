"""What every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Machines are shared: how long an example takes says nothing about it.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")


@pytest.fixture(autouse=True, scope="session")
def _no_settings_of_this_shell() -> Iterator[None]:
    """Tests must not see the settings or the state folder of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("SEALMESH_"):
                patch.delenv(name)
        yield
