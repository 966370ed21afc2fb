# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kata_device_plugin import cdi
from kata_device_plugin.cdi import Entry, SpecFile
from kata_device_plugin.errors import SpecUnwritable
from kata_device_plugin.resources import RESOURCES, Resource

GPU = Resource("nvidia.com/gpu")
ONE = (Entry("0000:65:00.0", "/dev/vfio/devices/vfio0"),)
TWO = (*ONE, Entry("0000:66:00.0", "/dev/vfio/devices/vfio1"))


def test_a_device_has_one_character_node_and_nothing_else() -> None:
    assert json.loads(cdi.document(GPU, ONE)) == {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            {
                "name": "0000:65:00.0",
                "containerEdits": {
                    "deviceNodes": [{"path": "/dev/vfio/devices/vfio0", "type": "c", "permissions": "rw"}]
                },
            }
        ],
    }


@given(st.lists(st.builds(Entry, st.text(), st.text())))
def test_every_document_is_json_that_says_what_it_was_given(entries: list[Entry]) -> None:
    devices = json.loads(cdi.document(GPU, entries))["devices"]
    assert [Entry(device["name"], device["containerEdits"]["deviceNodes"][0]["path"]) for device in devices] == entries


@pytest.fixture
def spec(tmp_path: Path) -> SpecFile:
    return SpecFile(str(tmp_path / "cdi"), GPU)


def names(path: str) -> list[str]:
    return [device["name"] for device in json.loads(Path(path).read_bytes())["devices"]]


def test_the_directory_is_made_and_the_file_is_readable_for_everybody(spec: SpecFile) -> None:
    assert spec.replace(ONE)
    assert names(spec.path) == ["0000:65:00.0"]
    assert os.stat(spec.path).st_mode & 0o777 == 0o644
    assert os.listdir(os.path.dirname(spec.path)) == ["kata.nvidia.com-gpu.json"]


def test_what_is_there_already_is_not_written_again(spec: SpecFile) -> None:
    spec.replace(ONE)
    before = os.stat(spec.path)
    assert not spec.replace(ONE)
    assert not spec.restore()
    assert not SpecFile(os.path.dirname(spec.path), GPU).replace(ONE)
    assert os.stat(spec.path) == before


def test_another_spelling_of_the_same_content_is_left_alone(spec: SpecFile) -> None:
    spec.replace(TWO)
    compact = json.dumps(json.loads(Path(spec.path).read_bytes()))
    Path(spec.path).write_text(compact)
    assert not spec.restore()
    assert Path(spec.path).read_text() == compact


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"cdiVersion": "0.5.0"}', b"[" * 100_000, b"\xff\xfe"])
def test_a_file_that_somebody_spoiled_is_written_again(spec: SpecFile, content: bytes) -> None:
    spec.replace(ONE)
    Path(spec.path).write_bytes(content)
    assert spec.restore()
    assert names(spec.path) == ["0000:65:00.0"]


def test_a_file_that_somebody_removed_is_written_again(spec: SpecFile) -> None:
    spec.replace(ONE)
    os.unlink(spec.path)
    assert spec.restore()
    assert names(spec.path) == ["0000:65:00.0"]


def test_without_devices_there_is_no_file(spec: SpecFile) -> None:
    spec.replace(ONE)
    assert spec.replace(())
    assert not os.path.exists(spec.path)
    assert not spec.replace(())


def test_a_directory_that_cannot_be_made_is_told_with_its_path_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "cdi").write_text("in the way")
    spec = SpecFile(str(tmp_path / "cdi"), GPU)
    with pytest.raises(SpecUnwritable) as caught:
        spec.replace(ONE)
    assert caught.value.path == spec.path
    assert spec.on_disk == frozenset()
    (tmp_path / "cdi").unlink()
    assert spec.restore()
    assert spec.on_disk == frozenset(ONE)


def occupied(spec: SpecFile) -> Path:
    """Make renaming onto the file fail, for root too, while what is read there stays as it is not."""
    os.unlink(spec.path)
    blocker = Path(spec.path)
    (blocker / "x").mkdir(parents=True)
    return blocker


def test_a_failed_replacement_leaves_no_temporary_file_behind(spec: SpecFile) -> None:
    spec.replace(ONE)
    occupied(spec)
    with pytest.raises(SpecUnwritable):
        spec.replace(TWO)
    assert os.listdir(os.path.dirname(spec.path)) == ["kata.nvidia.com-gpu.json"]


def test_a_file_that_names_another_devices_node_is_given_up_when_it_cannot_be_replaced(tmp_path: Path) -> None:
    """A full disk: renumbered nodes can't be written down, so the old names must not lead to them."""
    swapped = (Entry(TWO[1].name, TWO[0].node),)
    spec = SpecFile(str(tmp_path), GPU)
    spec.replace(TWO)
    tmp_path.chmod(0o755)
    full = FullDisk(str(tmp_path), GPU)
    full.replace(TWO)
    full.is_full = True
    with pytest.raises(SpecUnwritable):
        full.replace(swapped)
    assert not os.path.exists(full.path)
    full.is_full = False
    full.restore()
    full.is_full = True
    with pytest.raises(SpecUnwritable):
        full.replace((*swapped, Entry("0000:67:00.0", "/dev/vfio/devices/vfio7")))
    assert names(full.path) == [TWO[1].name]


def test_a_file_that_vanished_and_cannot_be_written_again_is_not_believed_in(tmp_path: Path) -> None:
    full = FullDisk(str(tmp_path), GPU)
    full.replace(TWO)
    full.is_full = True
    assert not full.restore()
    os.unlink(full.path)
    with pytest.raises(SpecUnwritable):
        full.restore()
    assert full.on_disk == frozenset()


class FullDisk(SpecFile):
    """A file system that has room or has none."""

    is_full = False

    def _write(self, data: bytes) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        super()._write(data)


def test_own_left_overs_go_and_files_of_others_stay(tmp_path: Path) -> None:
    now = 1_000_000.0
    stays = [
        "kata.nvidia.com-gpu.json",  # current
        "kata.nvidia.com-gpu.yaml",  # what another plugin writes
        "nvidia.yaml",
        "kata.example.com-gpu.json",
        ".kata.nvidia.com-gpu.json.7-abcd.tmp",  # another instance is writing it now
        "notes.txt",
    ]
    goes = ["kata.nvidia.com-pgpu.json", ".kata.nvidia.com-gpu.json.1-0000.tmp"]
    for name in stays + goes:
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (now - 3600, now - 3600))
    os.utime(tmp_path / stays[4], (now - 1, now - 1))
    removed = cdi.sweep(str(tmp_path), RESOURCES.values(), now_s=now)
    assert sorted(os.path.basename(path) for path in removed) == sorted(goes)
    assert sorted(os.listdir(tmp_path)) == sorted(stays)
    assert cdi.sweep(str(tmp_path / "nowhere"), RESOURCES.values()) == ()


def test_a_reader_in_a_loop_never_sees_a_torn_or_missing_file(spec: SpecFile) -> None:
    spec.replace(ONE)
    seen: list[object] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                seen.append(len(json.loads(Path(spec.path).read_bytes())["devices"]))
            except (OSError, ValueError) as error:
                seen.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(500):
        spec.replace(TWO)
        spec.replace(ONE)
    stop.set()
    reader.join()
    assert set(seen) <= {1, 2}
    assert len(seen) > 10
