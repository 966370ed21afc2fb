# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The table of foreign CDI files: the reference libraries judge them so, and the plugin judges like Kata's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conformance.foreign_specs import FOREIGN, PANICS, ForeignSpec
from conformance.json_lines import Refused
from conformance.machine import GPU, Machine, names, put
from conformance.reference_cdi import CdiLibrary

from kata_device_plugin import cdi_audit

_OURS = {GPU: frozenset({"0000:1b:00.0"})}


def _ids(spec: ForeignSpec) -> str:
    return spec.name


# Where the plugin's judgement differs from the library's: files that it reports although Kata reads them. None of these
# is likely to be written, and whoever wrote one meant something else. The other way round there is no exception.
_REPORTED_ALL_THE_SAME = frozenset(
    {
        "a second yaml document",
        "a yaml tag that nobody knows",
        "device name in yaml is a number",
        "device name in yaml is yes",
        "device name is a number",
        "device name is true",
        "json twice",
        "text after the json",
    }
)


@pytest.mark.parametrize("spec", FOREIGN, ids=_ids)
def test_the_reference_libraries_judge_as_the_table_says(
    spec: ForeignSpec, cdi_libraries: tuple[CdiLibrary, ...], tmp_path: Path
) -> None:
    path = tmp_path / f"foreign.{spec.suffix}"
    path.write_bytes(spec.data)
    for library in cdi_libraries:
        if spec.name in PANICS:
            with pytest.raises(Refused, match="panic"):
                library.open((tmp_path,))
            continue
        library.open((tmp_path,))
        findings = library.refresh()
        assert (findings.error == "") is spec.is_fine(library.release), f"{library.release}: {findings.error!r}"
        assert set(findings.files) == (set() if spec.is_fine(library.release) else {str(path)})


@pytest.mark.parametrize("spec", FOREIGN, ids=_ids)
def test_the_plugin_judges_like_the_library_in_kata(spec: ForeignSpec) -> None:
    reason = cdi_audit.judge(spec.data, _OURS)
    assert (reason is None) is (spec.fine_0_6 and spec.name not in _REPORTED_ALL_THE_SAME), reason


def test_the_names_in_the_table_are_distinct() -> None:
    assert len({spec.name for spec in FOREIGN}) == len(FOREIGN)
    assert {spec.name for spec in FOREIGN} >= _REPORTED_ALL_THE_SAME


def _spec_for(address: str) -> str:
    node = {"deviceNodes": [{"path": "/dev/null"}]}
    return json.dumps({"cdiVersion": "0.5.0", "kind": GPU, "devices": [{"name": address, "containerEdits": node}]})


def test_a_file_that_takes_one_of_our_names_breaks_that_name_and_is_reported(machine: Machine) -> None:
    plugin = machine.plugin()
    machine.settle()
    taken, other = machine.of(GPU)[:2]
    foreign = machine.cdi_dir / "somebody.json"
    put(foreign, _spec_for(taken))
    for library in machine.cdi:
        assert library.refresh().error
        with pytest.raises(Refused):
            library.inject(f"{GPU}={taken}")
        assert len(library.inject(f"{GPU}={other}")) == 1
    problem = plugin.wait_for("cdi.foreign-problem")
    assert problem["path"] == str(foreign)
    assert taken in json.dumps(problem)
    foreign.unlink()
    plugin.wait_for("cdi.foreign-solved")
    machine.settle()


def test_a_file_of_the_administrator_that_takes_one_of_our_names_is_reported(machine: Machine) -> None:
    # The libraries give the dynamic directory the higher priority and have no error; Kata's Rust runtime does not.
    plugin = machine.plugin()
    machine.settle()
    machine.cdi_static_dir.mkdir()
    foreign = machine.cdi_static_dir / "somebody.json"
    put(foreign, _spec_for(machine.of(GPU)[0]))
    assert plugin.wait_for("cdi.foreign-problem")["path"] == str(foreign)
    machine.settle()


def test_a_broken_file_beside_ours_fails_every_refresh_and_is_reported_once(machine: Machine) -> None:
    plugin = machine.plugin()
    machine.settle()
    torn = next(spec for spec in FOREIGN if spec.name == "torn json")
    foreign = machine.cdi_dir / "torn.json"
    put(foreign, torn.data)
    for library in machine.cdi:
        assert set(library.refresh().files) == {str(foreign)}
        assert len(library.inject(*names(GPU, machine.of(GPU)))) == 8
    assert plugin.wait_for("cdi.foreign-problem")["path"] == str(foreign)
    foreign.unlink()
    plugin.wait_for("cdi.foreign-solved")
    assert len(plugin.events("cdi.foreign-problem")) == 1
    machine.settle()
