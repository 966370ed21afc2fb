# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""`python -m vmlab build` makes what guests need."""

from __future__ import annotations

import argparse
import sys

from vmlab import artifacts
from vmlab.errors import LabError


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    parser = argparse.ArgumentParser(prog="vmlab", description="Guests with a real kernel.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="make what guests need, once, into the cache")
    parser.parse_args(arguments)
    try:
        built = artifacts.ensure()
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    print(built.root)
    print(f"kernel {built.kernel_release}, CPython {built.python}")
    for package, version in built.packages.items():
        print(f"{package} {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
