# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Generate the kubelet protocol modules; with a directory as argument, write them below it instead.

A test runs this into a temporary directory and compares, so that the committed modules are never stale.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

SOURCE = Path(__file__).parents[1] / "packages/kata-device-plugin/src"
PROTO = "kata_device_plugin/v1beta1/deviceplugin.proto"
HEADER = "# SPDX-FileCopyrightText: The kata-devices Authors\n# SPDX-License-Identifier: Apache-2.0\n"


def generate(target: Path) -> tuple[Path, ...]:
    """Write the protobuf module and its type stub below `target`; return both paths."""
    target.mkdir(parents=True, exist_ok=True)
    code = protoc.main(
        [
            "protoc",
            f"--proto_path={SOURCE}",
            f"--python_out={target}",
            f"--mypy_out=quiet:{target}",
            PROTO,
        ]
    )
    if code:
        raise SystemExit(code)
    package = target / Path(PROTO).parent
    written = (package / "deviceplugin_pb2.py", package / "deviceplugin_pb2.pyi")
    for path in written:
        path.write_text(HEADER + path.read_text())
    return written


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE)
