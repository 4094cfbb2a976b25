"""Folders that are made for one user, whatever the umask says, and those that are there and become so."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ratoon.core.private_folders import make_missing_folders, make_private_folder


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def folder_of_mode(folder: Path, wanted: int) -> Path:
    folder.mkdir(parents=True)
    folder.chmod(wanted)
    return folder


@pytest.fixture(autouse=True)
def lax_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_all_missing_folders_are_private(tmp_path):
    made = make_private_folder(tmp_path / "a" / "b", "roots", "model")
    assert made == tmp_path / "a" / "b" / "roots" / "model"
    assert {mode(made), *(mode(folder) for folder in list(made.parents)[:3])} == {0o700}


def test_a_folder_that_is_there_is_closed_to_others_and_the_one_above_it_stays(tmp_path):
    above = folder_of_mode(tmp_path / "above", 0o755)
    named = folder_of_mode(above / "named", 0o2775)
    roots = folder_of_mode(named / "roots", 0o755)
    make_private_folder(named, "roots", "model")
    assert (mode(above), mode(named), mode(roots)) == (0o755, 0o2700, 0o700)


def test_a_folder_of_several_users_stays_as_it_is(tmp_path):
    shared = folder_of_mode(tmp_path / "shared", 0o1777)
    assert mode(make_private_folder(shared, "roots")) == 0o700
    assert mode(shared) == 0o1777


def test_a_folder_of_another_user_stays_as_it_is(tmp_path, monkeypatch):
    named = folder_of_mode(tmp_path / "named", 0o755)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    make_private_folder(named)
    assert mode(named) == 0o755


def test_a_mode_that_cannot_be_changed_is_logged(tmp_path, monkeypatch, caplog):
    def refuse(path, mode):
        raise PermissionError("no modes here")

    named = folder_of_mode(tmp_path / "named", 0o755)
    monkeypatch.setattr(os, "chmod", refuse)
    assert make_private_folder(named) == named
    assert "no modes here" in caplog.text


def test_missing_folders_are_made_without_a_change_to_those_that_are_there(tmp_path):
    above = folder_of_mode(tmp_path / "above", 0o755)
    make_missing_folders(above / "a" / "b")
    make_missing_folders(above)
    assert (mode(above), mode(above / "a"), mode(above / "a" / "b")) == (0o755, 0o700, 0o700)
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(OSError):
            make_missing_folders(wrong)
