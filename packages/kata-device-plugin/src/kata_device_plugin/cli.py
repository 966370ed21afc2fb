# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: without arguments the daemon, `list` what it would advertise.

Exit codes: 0 told to stop, or listed; 1 a bug; 2 bad usage, a path too long for sockets included; 20 something that the
error line names.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import eventline
from eventline import EventLog
from kata_device_plugin import VERSION
from kata_device_plugin.daemon import Daemon, Settings
from kata_device_plugin.errors import PluginError
from kata_device_plugin.events import Event
from kata_device_plugin.ledger import Ledger
from kata_device_plugin.resources import RESOURCES
from kata_device_plugin.scanner import Scanner, Standing
from kata_device_plugin.server import HEALTHY, UNHEALTHY
from pcifacts.errors import PathUnreadable

if TYPE_CHECKING:
    import argparse

COMPONENT = "kata-device-plugin"

_PATHS = {
    "sysfs": "sysfs, read only",
    "dev_vfio": "directory of VFIO nodes, by its path on the host: CDI files name it",
    "device_plugin_dir": "the kubelet's device plugin directory, for sockets",
    "cdi_dir": "directory for generated CDI files, written to",
    "cdi_static_dir": "directory of CDI files kept by administrators, read only",
}


class NothingReadable(PluginError):
    """sysfs could not be looked at, so there is no list to print."""

    hint = "give --sysfs the mount point of sysfs, and check that this user may read it"


def main(argv: Sequence[str]) -> int:
    """Run one command; return its exit code."""
    log = EventLog(COMPONENT, VERSION)
    settings = Settings()
    if argv:
        given = vars(_parser().parse_args(argv))
        # A flag that was not given is not there at all, so that it may stand before or after the command.
        settings = Settings(**{field.name: given[field.name] for field in fields(Settings) if field.name in given})
        if given["command"] == "list":
            return _list(settings, given["output"], log)
    _quiet_libraries()
    return eventline.run(log, lambda: _serve(settings, log))


def _serve(settings: Settings, log: EventLog) -> int:
    daemon = Daemon(settings, log)
    log.info(
        Event.RUN_STARTED, pid=os.getpid(), **{field.name: getattr(settings, field.name) for field in fields(settings)}
    )
    asyncio.run(daemon.run())
    return eventline.EXIT_OK


def _list(settings: Settings, output: str, log: EventLog) -> int:
    scanner, ledger = Scanner(settings.roots), Ledger()
    try:
        observation = scanner.everything(())
    except PathUnreadable as error:
        log.error("run.finished", exit_code=NothingReadable.exit_code, error=str(error), hint=NothingReadable.hint)
        return NothingReadable.exit_code
    ledger.apply(observation.sightings, time.monotonic())
    for entry in observation.skipped:
        log.warning(Event.ENTRY_SKIPPED, path=entry.path, reason=entry.reason)
    without_nodes = [sighting for sighting in observation.sightings if sighting.standing is Standing.WITHOUT_NODES]
    if without_nodes:
        log.warning(
            Event.NODE_WITHOUT_DEVICE_NODES,
            devices=[sighting.address.text for sighting in without_nodes],
            reason=without_nodes[0].reason,
        )
    rows = [
        {
            "resource": resource.name,
            "id": listed.address.text,
            "health": HEALTHY if listed.healthy else UNHEALTHY,
            "node": listed.node,
            "numaNode": listed.place.numa_node,
            "cdiName": resource.qualified(listed.address.text),
            "reason": listed.reason,
        }
        for kind, resource in RESOURCES.items()
        for listed in ledger.of_kind(kind)
    ]
    sys.stdout.write(json.dumps(rows, indent=2) + "\n" if output == "json" else _table(rows))
    return eventline.EXIT_OK


def _table(rows: Sequence[dict[str, str | int | None]]) -> str:
    columns = ("resource", "id", "health", "node", "numaNode", "reason")
    heads = ("RESOURCE", "ID", "HEALTH", "NODE", "NUMA", "REASON")
    cells = [
        heads,
        *(tuple("-" if row[column] in (None, "") else str(row[column]) for column in columns) for row in rows),
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in cells
    )


def _parser() -> argparse.ArgumentParser:
    # A daemon without arguments, which is how it runs on a node, has no use for half a mebibyte of parser.
    import argparse  # noqa: PLC0415

    paths = argparse.ArgumentParser(add_help=False)
    for field in fields(Settings):
        paths.add_argument(
            "--" + field.name.replace("_", "-"),
            metavar="DIR",
            default=argparse.SUPPRESS,
            help=f"{_PATHS[field.name]} (default: {field.default})",
        )
    parser = argparse.ArgumentParser(
        prog=COMPONENT,
        parents=[paths],
        description="Advertise VFIO-bound NVIDIA devices to the kubelet; without a command, until told to stop.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{COMPONENT} {VERSION}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    listing = commands.add_parser(
        "list", parents=[paths], help="print what would be advertised, and exit", allow_abbrev=False
    )
    listing.add_argument("-o", "--output", choices=("table", "json"), default="table", help="default: table")
    return parser


def _quiet_libraries() -> None:
    """Keep tracebacks of libraries off standard error: what matters to the plugin reaches it as an exception."""
    for name in ("grpclib", "asyncio"):
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False
