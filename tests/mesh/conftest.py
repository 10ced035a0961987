"""The running mesh that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.mesh import RunningMesh, new_mesh

NOTES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """One real mesh: the demo model sealed on first use, a real engine, a real Redis.

    At the end it is stopped, and no process may be left of any of its runs.
    """
    mesh = new_mesh(tmp_path_factory.mktemp("mesh") / "state")
    try:
        mesh.up()
        yield mesh
        mesh.look()
    finally:
        mesh.cli("down", timeout_s=180)
        mesh.assert_nothing_left()


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Lines that the end of the session shows: measurements that are worth reading, passed or not."""
    lines: list[str] = []
    yield lines
    notes = request.config.stash.setdefault(NOTES, [])
    notes += [f"{request.node.name}: {line}" for line in lines]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if notes := config.stash.get(NOTES, []):
        terminalreporter.section("notes of the mesh")
        for line in notes:
            terminalreporter.write_line(line)
