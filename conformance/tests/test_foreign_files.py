# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The table of foreign CDI files: the reference libraries judge them so, and the plugin judges like Kata's."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.conftest import NewMachine
from conformance.foreign_specs import FOREIGN, ForeignSpec
from conformance.json_lines import Refused
from conformance.machine import GPU, Machine
from conformance.reference_cdi import CdiLibrary
from conformance.waiting import wait_until

_OURS = {GPU: frozenset({"0000:1b:00.0"})}


def _ids(spec: ForeignSpec) -> str:
    return spec.name


@pytest.mark.parametrize("spec", FOREIGN, ids=_ids)
def test_the_reference_libraries_judge_as_the_table_says(
    spec: ForeignSpec, cdi_libraries: tuple[CdiLibrary, ...], tmp_path: Path
) -> None:
    path = tmp_path / f"foreign.{spec.suffix}"
    path.write_bytes(spec.data)
    for library in cdi_libraries:
        library.open((tmp_path,))
        findings = library.refresh()
        assert (findings.error == "") is spec.is_fine(library.release), f"{library.release}: {findings.error!r}"
        assert set(findings.files) == (set() if spec.is_fine(library.release) else {str(path)})


@pytest.mark.parametrize("spec", FOREIGN, ids=_ids)
def test_the_plugin_judges_like_the_library_in_kata(spec: ForeignSpec) -> None:
    cdi_audit = pytest.importorskip("kata_device_plugin.cdi_audit")
    reason = cdi_audit.judge(spec.data, _OURS)
    assert (reason is None) is spec.fine_0_6, reason
