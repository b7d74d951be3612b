"""How files appear on disk."""

import contextlib
import errno

import pytest

from system import files


def test_a_folder_whose_new_name_is_not_on_disk_keeps_the_old_one(tmp_path, monkeypatch):
    """Else a checkpoint that has failed, and may be lost in a power cut, would count as one."""
    sync, made = files.sync, tmp_path / ".c.tmp"
    made.mkdir()

    def refused(path) -> None:
        if (tmp_path / "c").exists():
            raise OSError(errno.EIO, "no")
        sync(path)

    monkeypatch.setattr(files, "sync", refused)
    with pytest.raises(OSError, match="no"):
        files.publish(made, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == [".c.tmp"]


@pytest.mark.parametrize(
    "number, ours",
    [
        (errno.EACCES, False),
        (errno.EPERM, False),
        (errno.EROFS, False),
        (errno.EINVAL, False),
        (errno.EIO, True),
    ],
)
def test_a_folder_above_that_is_not_ours_needs_no_sync(tmp_path, monkeypatch, number, ours):
    """/home may not be open to us, / may be read-only; but what a disk refuses is no checkpoint."""
    sync, made = files.sync, tmp_path / ".c.tmp"
    made.mkdir()

    def refused(path) -> None:
        if path == tmp_path.parent:
            raise OSError(number, "no")
        sync(path)

    monkeypatch.setattr(files, "sync", refused)
    with pytest.raises(OSError, match="no") if ours else contextlib.nullcontext():
        files.publish(made, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == [".c.tmp" if ours else "c"]


def test_a_json_file_without_an_object_is_as_if_it_were_not_there(tmp_path):
    """As one that a full disk has cut, or another program's."""
    path = tmp_path / "status.json"
    assert files.read_json(path) == {}
    for text in (b'{"step": 3', b"[3]", b"3", b"\xff", b""):
        path.write_bytes(text)
        assert files.read_json(path) == {}
    path.write_text('{"step": 3}')
    assert files.read_json(path) == {"step": 3}
