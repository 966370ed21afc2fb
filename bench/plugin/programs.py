# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The Go programs of this benchmark, built once into the cache that the conformance suite uses as well."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from conformance import build

KUBELET: Final = "bench-kubelet"
STUB: Final = "bench-stub"
SCAN: Final = "bench-scan"

# Relative to the conformance folder, where the builder looks.
_MODULE: Final = "../bench/plugin/go"

for _name in (KUBELET, STUB, SCAN):
    build.PROGRAMS[_name] = build.Program(_name, f"{_MODULE}/{_name.removeprefix('bench-')}", _MODULE)


def ensure(name: str) -> Path:
    """Return the path of a program, building it first when the cache does not have it.

    Raises: conformance.build.BuildFailed.
    """
    return build.ensure(name)
