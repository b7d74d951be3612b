"""The manifest of a folder of token files: read, or refused. What changes a folder after it was made is in
tests/tools/prepare/test_folders.py; what cannot be trained on in test_loader.py."""

import json

import pytest

from data.folder import FORMAT, MANIFEST, manifest_of, read_manifest
from tests.conftest import refuses

pytestmark = pytest.mark.quick


def test_manifest_is_read_as_it_was_written(prepared):
    assert manifest_of(prepared) == json.loads((prepared / MANIFEST).read_text())


@pytest.mark.parametrize(
    "text, words",
    [
        ("no JSON", "is no manifest"),
        ("[]", "is no manifest"),
        ('{"files": []}', "is no manifest"),
        ('{"identity": {"version": 7}}', f"format 7, and this one reads {FORMAT}"),
    ],
)
def test_manifest_that_cannot_be_used_is_refused(tmp_path, text, words):
    (tmp_path / MANIFEST).write_text(text)
    with refuses(str(tmp_path), words):
        manifest_of(tmp_path)


def test_folder_without_a_readable_manifest_is_refused(tmp_path):
    assert read_manifest(tmp_path) is None
    with refuses(str(tmp_path), "holds no prepared data", "-m prepare"):
        manifest_of(tmp_path)
    (tmp_path / MANIFEST).mkdir()
    with refuses(MANIFEST, "cannot be read: Is a directory"):
        manifest_of(tmp_path)
