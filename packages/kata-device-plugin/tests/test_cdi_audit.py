# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kata_device_plugin import cdi, cdi_audit
from kata_device_plugin.cdi import Entry
from kata_device_plugin.cdi_audit import Audit
from kata_device_plugin.resources import Resource

OWN = {"nvidia.com/gpu": frozenset({"0000:65:00.0", "0000:66:00.0"})}
NODE = {"deviceNodes": [{"path": "/dev/null"}]}


def spec(**changes: Any) -> bytes:
    whole: dict[str, Any] = {
        "cdiVersion": "0.5.0",
        "kind": "example.com/device",
        "devices": [{"name": "one", "containerEdits": NODE}],
    }
    whole.update(changes)
    return json.dumps({key: value for key, value in whole.items() if value is not None}).encode()


@pytest.mark.parametrize(
    "data",
    [
        spec(),
        spec(cdiVersion="v0.5.0"),
        spec(devices=[]),
        spec(kind="nvidia.com/gpu"),
        spec(kind="nvidia.com/pgpu", devices=[{"name": "0000:65:00.0", "containerEdits": NODE}]),
        b"cdiVersion: '0.5.0'\nkind: nvidia.com/gpu\ndevices:\n- name: all\n  containerEdits:\n    env: [A=b]\n",
    ],
)
def test_sound_files_that_take_none_of_our_names_are_no_problem(data: bytes) -> None:
    assert cdi_audit.judge(data, OWN) is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "expected a mapping"),
        (b"{", "neither JSON nor YAML"),
        (b"a: [b", "neither JSON nor YAML"),
        (b"- a\n", "expected a mapping"),
        (b"\xff\xfe\x00", "neither JSON nor YAML"),
        (spec(cdiVersion="1.1.0"), "0.6.0 at most"),
        (spec(cdiVersion="9.9"), "0.6.0 at most"),
        (spec(cdiVersion=0.5), "0.6.0 at most"),
        (spec(cdiVersion=None), "0.6.0 at most"),
        (spec(kind="gpu"), "vendor/class"),
        (spec(kind=None), "vendor/class"),
        (spec(kind="nvidia.com/gpu/x"), "vendor/class"),
        (spec(kind="example.com/a.b"), "0.6.0 at least"),
        (spec(devices=[{"name": "one"}]), "no container edits"),
        (spec(devices=[{"name": "one", "containerEdits": {}}]), "no container edits"),
        (spec(devices=[{"name": "one", "containerEdits": NODE}] * 2), "stands twice"),
        (spec(devices=[{"name": "o ne", "containerEdits": NODE}]), "letters, digits"),
        (spec(devices={}), "expected a list"),
        (spec(extra=1), "unknown key 'extra'"),
        (spec(cdiVersion="0.4.0", devices=[{"name": "1", "containerEdits": NODE}]), "0.5.0 at least"),
        (spec(annotations={"a": "b"}), "0.6.0 at least"),
        (spec(containerEdits={"env": ["nothing"]}), "NAME=VALUE"),
        (spec(containerEdits={"deviceNodes": [{"type": "c"}]}), "without path"),
        (spec(containerEdits={"deviceNodes": [{"path": "/dev/x", "type": "z"}]}), "b, c, u or p"),
        (spec(containerEdits={"deviceNodes": [{"path": "/dev/x", "permissions": "rx"}]}), "rwm"),
        (spec(containerEdits={"mounts": [{"hostPath": "/a"}]}), "without hostPath or containerPath"),
        (spec(containerEdits={"hooks": [{"path": "/a"}]}), "hookName None"),
        (spec(kind="nvidia.com/gpu", devices=[{"name": "0000:66:00.0", "containerEdits": NODE}]), "as well as this"),
    ],
)
def test_what_stops_a_sandbox_or_takes_our_names_is_told_in_words(data: bytes, words: str) -> None:
    assert words in (cdi_audit.judge(data, OWN) or "")


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["cdiVersion", "kind", "devices", "containerEdits", "annotations"]),
        JSONISH
        | st.just("0.5.0")
        | st.just("example.com/x")
        | st.lists(st.fixed_dictionaries({"name": JSONISH | st.just("a"), "containerEdits": JSONISH | st.just(NODE)})),
    )
)
def test_no_structure_whatsoever_makes_the_judge_fail(whole: dict[str, Any]) -> None:
    cdi_audit.judge(json.dumps(whole).encode(), OWN)


@given(st.binary(max_size=200))
def test_no_bytes_whatsoever_make_the_judge_fail(data: bytes) -> None:
    cdi_audit.judge(data, OWN)


def test_our_own_file_passes_our_own_judgement() -> None:
    document = cdi.document(Resource("nvidia.com/gpu"), [Entry("0000:67:00.0", "/dev/vfio/devices/vfio0")])
    assert cdi_audit.judge(document, OWN) is None


def test_an_address_in_yaml_without_quotes_is_a_name_and_not_a_number_in_base_60() -> None:
    text = "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: {}\n  containerEdits: {{env: [A=b]}}\n"
    assert cdi_audit.judge(text.format("0000:15:00.0").encode(), OWN) is None
    assert "as well as" in (cdi_audit.judge(text.format("0000:65:00.0").encode(), OWN) or "")
    assert "nvidia.com/gpu=0000:15:00.0" in (
        cdi_audit.judge(text.format("0000:15:00.0").encode(), {"nvidia.com/gpu": frozenset({"0000:15:00.0"})}) or ""
    )


@pytest.fixture
def directories(tmp_path: Path) -> tuple[Path, Path]:
    first, second = tmp_path / "etc", tmp_path / "run"
    first.mkdir()
    second.mkdir()
    return first, second


def problems(audit: Audit, *directories: Path) -> list[tuple[str, str]]:
    found = audit.problems(map(str, directories), OWN)
    return [(Path(problem.path).name, problem.reason) for problem in found]


def test_one_problem_for_each_bad_file_and_none_for_ours_or_for_other_suffixes(directories: tuple[Path, Path]) -> None:
    first, second = directories
    (first / "good.json").write_bytes(spec())
    (first / "bad.yaml").write_text("a: [b")
    (second / "gone.json").symlink_to("nowhere")
    (second / "loop.json").symlink_to("loop.json")
    (second / "large.yaml").write_bytes(b"#" * (cdi_audit.SIZE_LIMIT + 1))
    os.mkfifo(second / "pipe.json")
    (second / "ignored.yml").write_text("a: [b")
    (second / "kata.nvidia.com-gpu.json").write_text("ours")
    (second / "directory.json").mkdir()
    found = problems(Audit(), first, second, second, first.parent / "nowhere")
    assert [(name, " ".join(reason.split()[:2])) for name, reason in found] == [
        ("bad.yaml", "is broken:"),
        ("gone.json", "is a"),
        ("large.yaml", "is larger"),
        ("loop.json", "cannot be"),
        ("pipe.json", "is no"),
    ]


def test_a_directory_that_cannot_be_listed_is_a_problem_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert problems(Audit(), tmp_path / "file") == [("file", "cannot be listed: Not a directory")]


def test_a_file_is_read_again_only_when_it_changed(directories: tuple[Path, Path]) -> None:
    audit, (first, _) = Audit(), directories
    path = first / "somebody.json"
    path.write_bytes(spec())
    assert problems(audit, first) == []
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [name for name, _ in problems(audit, first)] == ["somebody.json"], "the time of the change tells"
    path.unlink()
    assert problems(audit, first) == []
    path.write_bytes(spec(kind="nvidia.com/gpu", devices=[{"name": "0000:65:00.0", "containerEdits": NODE}]))
    assert len(problems(audit, first)) == 1
    assert audit.problems([str(first)], {"nvidia.com/gpu": frozenset()}) == (), "our names are compared anew each time"
