"""The vault's catalog: what it offers, what it says of what it does not, and how often."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from sealmesh.security.keys.signing import create_signing_key
from sealmesh.security.sealed.format import MANIFEST_NAME
from sealmesh.security.vault.catalog import ModelCatalog
from sealmesh.telemetry.logging import StructuredLogger
from sealmesh.telemetry.runtime.errors import SealmeshError

from tests.unit.security.conftest import SAMPLE_FILES, Lab


@pytest.fixture
def models(lab: Lab, tmp_path: Path) -> Path:
    lab.seal_into(lab.plain(SAMPLE_FILES), tmp_path / "models" / "renamed", name="original")
    return tmp_path / "models"


def catalog(models: Path, lab: Lab) -> ModelCatalog:
    logger = logging.getLogger("sealmesh.test-catalog")
    logger.setLevel(logging.DEBUG)
    return ModelCatalog(models, [lab.verifying_key], StructuredLogger("vault", logger))


def refusal(found: ModelCatalog, name: str) -> str:
    with pytest.raises(SealmeshError) as caught:
        found.find(name)
    assert caught.value.reason == "MODEL_NOT_FOUND"
    return caught.value.message


def test_a_model_keeps_its_sealed_name_and_the_error_says_so(models: Path, lab: Lab) -> None:
    found = catalog(models, lab)
    assert "the folder renamed holds a model that was sealed as 'original'" in refusal(found, "renamed")
    assert refusal(found, "nope").endswith("there are: original")
    assert found.find("original").path == models / "renamed"


def test_an_empty_folder_says_how_to_seal(lab: Lab, tmp_path: Path) -> None:
    assert refusal(catalog(tmp_path, lab), "nope").endswith("seal one with: sealmesh seal")


def test_a_sealed_folder_that_is_left_out_is_warned_about_once(
    models: Path, lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = catalog(models, lab)
    stranger._pinned = [create_signing_key(tmp_path / "other.key", tmp_path / "other.pub")]
    with caplog.at_level(logging.DEBUG):
        for round_ in range(3):
            # A new state of the manifest is read anew.
            manifest = models / "renamed" / MANIFEST_NAME
            manifest.write_bytes(manifest.read_bytes() + bytes(round_))
            assert stranger.scan() == {}
    assert [r.levelno for r in caplog.records].count(logging.WARNING) == 1


def test_a_folder_that_is_no_sealed_model_is_no_warning(
    models: Path, lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    for name, content in (("plain", None), ("odd", b"a file of somebody else")):
        (models / name).mkdir()
        if content is not None:
            (models / name / MANIFEST_NAME).write_bytes(content)
    with caplog.at_level(logging.DEBUG):
        assert list(catalog(models, lab).scan()) == ["original"]
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
