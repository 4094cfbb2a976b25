"""The directory for sockets: private, removed by the next start when its client was killed, never while it lives."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ratoon.engine.processes.socket_directory import (
    LOCK,
    NEW_LOCK,
    SECONDS_TO_MAKE,
    SocketDirectory,
    remove_if_abandoned,
)


@pytest.fixture
def parent(tmp_path_factory, monkeypatch) -> Path:
    folder = tmp_path_factory.mktemp("d")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    if len(str(folder)) > 55:
        pytest.skip("the path of the temporary folder is too long for sockets")
    return folder


def abandon(parent: Path) -> Path:
    """What a client leaves that is killed: a directory with a lock that is not held, and a socket."""
    made = parent / "ratoon-engine-abandoned"
    made.mkdir(mode=0o700)
    (made / LOCK).touch()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(made / "0-1-in"))
    return made


def test_it_is_private_and_goes_with_its_client(parent):
    directory = SocketDirectory()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert directory.path.parent == parent
    directory.remove()
    assert list(parent.iterdir()) == []


def test_the_next_start_removes_what_a_killed_client_left_and_nothing_of_one_that_lives(parent):
    living = SocketDirectory()
    abandoned = abandon(parent)
    another = SocketDirectory()
    assert not abandoned.exists()
    assert living.path.exists() and another.path.exists()
    living.remove()
    another.remove()


def test_a_client_in_another_process_keeps_its_directory_until_it_is_killed(parent):
    program = (
        "import sys; from ratoon.engine.processes.socket_directory import SocketDirectory;"
        "d = SocketDirectory(); print(d.path, flush=True); sys.stdin.read()"
    )
    client = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    made = Path(client.stdout.readline().strip())
    try:
        remove_if_abandoned(made)
        assert made.exists()
    finally:
        client.kill()
        client.communicate()
    assert made.exists()
    remove_if_abandoned(made)
    assert not made.exists()


def test_directories_of_others_and_other_things_are_left_alone(parent, tmp_path):
    open_to_all = abandon(parent).rename(parent / "ratoon-engine-open")
    open_to_all.chmod(0o755)
    other_name = parent / "something"
    other_name.mkdir(mode=0o700)
    (other_name / LOCK).touch()
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (target / LOCK).touch()
    (parent / "ratoon-engine-link").symlink_to(target)
    (parent / "ratoon-engine-file").touch()
    linked_lock = parent / "ratoon-engine-linked-lock"
    linked_lock.mkdir(mode=0o700)
    (linked_lock / LOCK).symlink_to(target / LOCK)
    without_lock = parent / "ratoon-engine-older"
    without_lock.mkdir(mode=0o700)
    (without_lock / "0-1-in").touch()
    before = sorted(parent.iterdir())
    SocketDirectory().remove()
    assert sorted(parent.iterdir()) == before
    assert (target / LOCK).exists()


def test_a_directory_of_another_user_is_left_alone(parent, monkeypatch):
    abandoned = abandon(parent)
    monkeypatch.setattr(os, "geteuid", lambda: abandoned.stat().st_uid + 1)
    remove_if_abandoned(abandoned)
    assert abandoned.exists()


def test_an_empty_directory_is_one_that_is_being_made_until_it_is_old(parent):
    empty = parent / "ratoon-engine-empty"
    empty.mkdir(mode=0o700)
    remove_if_abandoned(empty)
    assert empty.exists()
    long_ago = empty.stat().st_mtime - 2 * SECONDS_TO_MAKE
    os.utime(empty, (long_ago, long_ago))
    remove_if_abandoned(empty)
    assert not empty.exists()


def test_a_directory_whose_lock_was_being_made_is_removed_when_it_is_old(parent):
    unmade = parent / "ratoon-engine-unmade"
    unmade.mkdir(mode=0o700)
    (unmade / NEW_LOCK).touch()
    remove_if_abandoned(unmade)
    assert unmade.exists()
    long_ago = unmade.stat().st_mtime - 2 * SECONDS_TO_MAKE
    os.utime(unmade, (long_ago, long_ago))
    remove_if_abandoned(unmade)
    assert not unmade.exists()


def test_a_socket_that_is_made_while_the_directory_is_removed_goes_with_it(parent, monkeypatch):
    directory = SocketDirectory()
    rmtree = shutil.rmtree

    def remove_while_an_engine_binds(path, **options):
        monkeypatch.setattr(shutil, "rmtree", rmtree)
        for entry in path.iterdir():
            entry.unlink()
        (path / "0-1-in").touch()  # so that the directory itself is not empty, and stays

    monkeypatch.setattr(shutil, "rmtree", remove_while_an_engine_binds)
    directory.remove()
    assert list(parent.iterdir()) == []
