"""How files and folders appear on disk."""

import errno
import pathlib

import pytest

from system import files

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "folder, moment, number, is_published",
    [
        # /home may not be open to us, / may be read-only
        ("..", "before", errno.EACCES, True),
        ("..", "before", errno.EPERM, True),
        ("..", "before", errno.EROFS, True),
        ("..", "before", errno.EINVAL, True),
        ("..", "before", errno.EIO, False),
        # the new name may be lost in a power cut
        (".", "after", errno.EIO, False),
    ],
)
def test_folder_has_its_final_name_only_if_that_is_on_disk(
    tmp_path, monkeypatch, folder, moment, number, is_published
):
    """The sync of a folder fails before or after the rename."""
    temporary = tmp_path / ".c.tmp"
    temporary.mkdir()
    sync = files.sync

    def refuse(path: pathlib.Path) -> None:
        is_renamed = (tmp_path / "c").exists()
        if path == (tmp_path / folder).resolve() and is_renamed == (moment == "after"):
            raise OSError(number, "no")
        sync(path)

    monkeypatch.setattr(files, "sync", refuse)
    try:
        files.publish(temporary, tmp_path / "c")
    except OSError:
        assert not is_published
    assert [path.name for path in tmp_path.iterdir()] == ["c" if is_published else ".c.tmp"]


@pytest.mark.parametrize("content", [None, b'{"step": 3', b"[3]", b"3", b"\xff", b""])
def test_json_file_without_an_object_is_as_if_it_were_missing(tmp_path, content):
    """As one that a full disk has cut, or another program's."""
    path = tmp_path / "status.json"
    if content is not None:
        path.write_bytes(content)
    assert files.read_json(path) == {}


def test_written_file_replaces_the_one_before_whole(tmp_path):
    path = tmp_path / "status.json"
    for step in (3, 14):
        files.write_atomic(path, f'{{"step": {step}}}')
        assert files.read_json(path) == {"step": step}
    assert [*tmp_path.iterdir()] == [path]
    with pytest.raises(OSError, match="status.json"):
        files.write_atomic(path / "status.json", "")


def test_lock_is_held_by_one_until_it_is_released(tmp_path):
    path = tmp_path / ".lock"
    held = files.lock(path)
    with pytest.raises(TimeoutError):
        files.lock(path)
    held.release()
    files.lock(path).release()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EIO])
def test_disk_without_locks_locks_nothing_and_warns(tmp_path, monkeypatch, capsys, number):
    def refuse(handle: int, how: int) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr("fcntl.flock", refuse)
    for _ in range(2):
        files.lock(tmp_path / ".lock").release()
    assert capsys.readouterr().err.count(f"{tmp_path}: no locks on this file system") == 1
