"""The files of a run that grow line by line: whole lines only, and no file ahead of the others."""

import errno
import os
import resource
from pathlib import Path

import pytest

from asyncspec.files import LineFiles, new_folder, put_back, replace_file


def test_lines_are_appended_and_a_file_can_be_begun_anew(tmp_path):
    files = LineFiles(tmp_path, pytest.fail)
    for new, expected in ((False, "a\nb\n"), (False, "a\nb\na\nb\n"), (True, "a\nb\n")):
        file = files.open("rows", new)
        file.write("a\n")
        file.write(b"b\n")
        file.sync()
        file.close()
        assert (tmp_path / "rows").read_text() == expected and not files.failure
    assert os.listdir(tmp_path) == ["rows"]


@pytest.fixture
def small_files():
    """Allow files of 5,000 bytes, so that a longer write succeeds in part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_does_not_fit_is_left_out_whole_and_no_file_is_written_any_more(tmp_path, small_files):
    said = []
    files = LineFiles(tmp_path, said.append, spare=0)
    ledger, rows = files.open("ledger"), files.open("rows")
    small_files()
    for number in range(60):
        ledger.write(f"{number:03} {'x' * 95}\n")
    rows.write("a row\n")
    rows.sync()
    assert said == [files.failure] == [f"{tmp_path}/ledger cannot be written: File too large"] and files.stopped
    assert len((tmp_path / "ledger").read_text().splitlines()) == 50 and (tmp_path / "rows").read_text() == ""


def test_a_full_disk_has_room_for_the_last_lines(tmp_path, monkeypatch):
    said, write = [], os.write
    files = LineFiles(tmp_path, said.append)
    file, other = files.open("ledger"), files.open("rows")
    assert os.fstat(files._spare).st_blocks * 512 >= 1 << 22

    def write_once_there_is_room(descriptor, data):
        if files._spare is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_once_there_is_room)
    file.write("dropped\n")
    other.write("a row\n")
    file.write("ended\n")
    monkeypatch.undo()
    assert said == [f"{tmp_path}/ledger cannot be written: No space left on device"] and not files.stopped
    assert (tmp_path / "ledger").read_text() == "dropped\nended\n" and (tmp_path / "rows").read_text() == "a row\n"


@pytest.mark.parametrize("what", ["file", "folder", "replaced"])
def test_a_file_that_is_no_longer_there_is_noticed(tmp_path, what):
    said = []
    (tmp_path / "run").mkdir()
    files = LineFiles(tmp_path / "run", said.append)
    file = files.open("ledger")
    file.write("line\n")
    file.sync()
    assert not said
    if what == "folder":
        (tmp_path / "run").rename(tmp_path / "elsewhere")
    else:
        (tmp_path / "run" / "ledger").unlink()
    if what == "replaced":
        (tmp_path / "run" / "ledger").touch()
    file.sync()
    why = "another file has taken its place" if what == "replaced" else "No such file or directory"
    assert said == [f"{tmp_path}/run/ledger cannot be written: {why}"] and files.stopped


def test_a_file_that_cannot_be_replaced_is_named(tmp_path, monkeypatch):
    (tmp_path / "rows.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/rows.partial'"):
        replace_file(tmp_path / "rows", "a row\n")


def test_a_folder_takes_the_place_of_one_that_cannot_be_removed(tmp_path, monkeypatch):
    """NFS keeps a folder of which somebody reads a file. It may be renamed."""
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "read").write_text("old")
    monkeypatch.setattr("shutil.rmtree", lambda folder, ignore_errors: None)
    with new_folder(tmp_path / "export") as partial:
        (partial / "new").write_text("new")
    assert os.listdir(tmp_path / "export") == ["new"]
    monkeypatch.undo()
    with new_folder(tmp_path / "export") as partial:
        pass
    assert os.listdir(tmp_path) == ["export"]


def test_a_folder_keeps_its_name_if_the_one_that_should_replace_it_cannot_have_it(tmp_path, monkeypatch):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "read").write_text("old")
    rename = Path.rename

    def refused(self, target):
        if self.name == "export.partial":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="Input/output error"), new_folder(tmp_path / "export"):
        pass
    assert sorted(os.listdir(tmp_path)) == ["export"] and os.listdir(tmp_path / "export") == ["read"]
    monkeypatch.undo()
    (tmp_path / "export").rename(tmp_path / "export.before.partial")  # killed between the two renames
    put_back(tmp_path / "export")
    assert os.listdir(tmp_path) == ["export"]
