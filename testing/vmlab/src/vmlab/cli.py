# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""The lab's command line: make the artifacts, and try something in a guest.

Exit codes: 0 done; 1 a bug; 2 bad usage; 20 something that the printed line names. `run` ends as its command does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vmlab import artifacts
from vmlab.device import h100, nvswitch
from vmlab.errors import LabError
from vmlab.guest import Guest
from vmlab.machine import Iommu

_FAILED = 20


def main(argv: Sequence[str]) -> int:
    """Run one command; return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.do(arguments))
    except LabError as error:
        print(error, file=sys.stderr)
        return _FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vmlab", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="make the artifacts, unless they are there; print where they are")
    build.add_argument("--anew", action="store_true", help="make them even if they are there, from today's packages")
    build.set_defaults(do=_build)

    run = commands.add_parser("run", help="start a guest with two GPUs and a switch, run a command in it, end it")
    run.add_argument("--iommu", type=Iommu, choices=tuple(Iommu), default=Iommu.INTEL, help="default: intel")
    run.add_argument("--stock-modules", action="store_true", help="vfio modules as shipped: no per-device nodes")
    run.add_argument("command", help="for bash")
    run.set_defaults(do=_run)

    prune = commands.add_parser("prune", help="remove artifacts of older recipes")
    prune.set_defaults(do=_prune)
    return parser


def _build(arguments: argparse.Namespace) -> int:
    print(artifacts.ensure(anew=arguments.anew).root)
    return 0


def _run(arguments: argparse.Namespace) -> int:
    functions = (h100("gpu0"), h100("gpu1"), nvswitch("switch0"))
    found = artifacts.ensure()
    with Guest(found, functions=functions, iommu=arguments.iommu, device_nodes=not arguments.stock_modules) as guest:
        print(f"up after {guest.boot_s:.0f} s, Linux {found.kernel_release}", file=sys.stderr, flush=True)
        done = guest.run(arguments.command, within_s=600)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return _FAILED if done.exit_code is None else done.exit_code


def _prune(_: argparse.Namespace) -> int:
    for removed in artifacts.prune():
        print(removed)
    return 0
