# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Directory watches against the kernel's own inotify, in temporary directories."""

from __future__ import annotations

import errno
import select
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kata_device_plugin import inotify, watch
from kata_device_plugin.watch import DirectoryWatch, Names, Unavailable


class Watched:
    """A watch of one directory, and what it has told so far."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.watch = DirectoryWatch([str(target)])

    def told(self) -> Mapping[str, Names]:
        ready, _, _ = select.select([self.watch], [], [], 5.0)
        assert ready, "no event within 5 s"
        return self.watch.read()

    def names(self) -> Names:
        changes = self.told()
        while str(self.target) not in changes:
            changes = self.told()
        return changes[str(self.target)]

    def is_quiet(self) -> bool:
        return not select.select([self.watch], [], [], 0.0)[0] or not self.watch.read()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    target = tmp_path / "vfio" / "devices"
    target.mkdir(parents=True)
    subject = Watched(target)
    yield subject
    subject.watch.close()


def test_an_entry_that_comes_goes_or_is_renamed_is_told_by_name(watched: Watched) -> None:
    (watched.target / "vfio0").touch()
    assert "vfio0" in (watched.names() or ())
    while not watched.is_quiet():
        pass
    (watched.target / "vfio0").rename(watched.target / "vfio1")
    assert watched.names() == frozenset({"vfio0", "vfio1"})
    (watched.target / "vfio1").unlink()
    assert watched.names() == frozenset({"vfio1"})


def test_a_directory_that_goes_and_returns_is_told_as_a_whole_both_times_and_watched_again(watched: Watched) -> None:
    shutil.rmtree(watched.target)
    assert watched.names() is None
    watched.target.mkdir()
    assert watched.names() is None
    (watched.target / "vfio0").touch()
    assert "vfio0" in (watched.names() or ())


def test_a_directory_that_is_replaced_between_two_reads_is_told_although_it_may_have_the_same_inode(
    watched: Watched,
) -> None:
    for _ in range(20):
        shutil.rmtree(watched.target)
        watched.target.mkdir()
        assert watched.names() is None
        while not watched.is_quiet():
            pass


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_directory_that_does_not_exist_yet_is_found_however_deep_it_will_be(depth: int, tmp_path: Path) -> None:
    target = tmp_path.joinpath(*[f"level{level}" for level in range(depth)])
    subject = Watched(target)
    target.mkdir(parents=True)
    (target / "vfio0").touch()
    assert subject.names() is None
    while not subject.is_quiet():
        pass
    (target / "vfio1").touch()
    assert "vfio1" in (subject.names() or ())
    shutil.rmtree(tmp_path / "level0")
    assert subject.names() is None
    target.mkdir(parents=True)
    assert subject.names() is None
    subject.watch.close()


def test_what_happens_beside_the_way_to_a_directory_is_not_told(tmp_path: Path) -> None:
    subject = Watched(tmp_path / "missing")
    (tmp_path / "other").mkdir()
    (tmp_path / "file").touch()
    assert subject.is_quiet()
    subject.watch.close()


def test_two_directories_are_told_apart(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    both = DirectoryWatch([str(first), str(second)])
    (second / "x").touch()
    assert set(both.read()) == {str(second)}
    (first / "x").touch()
    assert set(both.read()) == {str(first)}
    both.close()


def test_one_directory_below_another_sees_its_own_entries(tmp_path: Path) -> None:
    outer, inner = tmp_path / "vfio", tmp_path / "vfio" / "devices"
    both = DirectoryWatch([str(outer), str(inner)])
    inner.mkdir(parents=True)
    changes = both.read()
    assert changes[str(outer)] is None
    assert changes[str(inner)] is None
    (inner / "vfio0").touch()
    assert set(both.read()) == {str(inner)}
    both.close()


def test_a_lost_event_means_everything_must_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Watched(tmp_path)
    monkeypatch.setattr(inotify.Inotify, "read", lambda _: [inotify.Event(watch=-1, mask=inotify.Q_OVERFLOW, name="")])
    assert subject.watch.read() == {str(tmp_path): None}
    subject.watch.close()


@pytest.mark.parametrize(
    ("number", "limit"), [(errno.EMFILE, "max_user_instances"), (errno.ENOSPC, "max_user_watches"), (errno.EACCES, "")]
)
def test_the_limit_in_the_way_is_named(number: int, limit: str) -> None:
    assert limit in str(Unavailable(OSError(number, "")))


def test_the_masks_are_those_of_the_kernel() -> None:
    """Told apart by the other wrapper of inotify, which has them from the same header."""
    flags = pytest.importorskip("inotify_simple").flags
    for name in ("ATTRIB", "CLOSE_WRITE", "MOVED_FROM", "MOVED_TO", "CREATE", "DELETE", "DELETE_SELF", "MOVE_SELF"):
        assert getattr(inotify, name) == flags[name]
    for name in ("UNMOUNT", "Q_OVERFLOW", "IGNORED", "ONLYDIR", "MASK_ADD"):
        assert getattr(inotify, name) == flags[name]
    assert watch._TARGET_MASK & flags.ONLYDIR
