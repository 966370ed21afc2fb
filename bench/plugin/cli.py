# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The command line. Exit status: 0 measured, whatever came out; 1 the harness failed; 2 bad usage."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.plugin import measure, programs, report
from bench.plugin.extent import FULL, SHORT, Extent
from bench.plugin.samples import Samples
from bench.plugin.subject import OURS, NotStarted, Subject
from conformance.build import BuildFailed
from conformance.json_lines import Gone

STUB: Final = "kubelet-stub"
_INSIDE: Final = "KATA_DEVICES_BENCH_INSIDE"


@dataclass(frozen=True, slots=True)
class Request:
    """What a command line asks for."""

    extent: Extent
    ours: tuple[str, ...]
    peers: tuple[Subject, ...]
    stub: bool
    json: Path | None


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line; ends the process on bad usage, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.plugin",
        description="Measure our device plugin, and any peer, on the same simulated node. Run it as root for peers.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        type=Subject.parse,
        metavar="NAME=COMMAND",
        help="another device plugin, which finds the node at the real paths; repeatable",
    )
    parser.add_argument("--ours", metavar="COMMAND", help="another command line for ours, with the same path flags")
    parser.add_argument(
        "--without-stub", action="store_true", help=f"leave out {STUB}, the peer that is built here from Kubernetes"
    )
    parser.add_argument("--short", action="store_true", help="every figure from few samples, in 90 s; for CI")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the samples there")
    known = parser.parse_args(arguments)
    names = [OURS, STUB, measure.GO_LOOP, *(peer.name for peer in known.peer)]
    if len(set(names)) < len(names):
        parser.error(f"--peer: names must differ from one another and from {OURS}, {STUB} and {measure.GO_LOOP}")
    plugin = str(Path(sys.executable).with_name("kata-device-plugin"))
    ours = (plugin,) if known.ours is None else Subject.parse(f"{OURS}={known.ours}").command
    return Request(SHORT if known.short else FULL, ours, tuple(known.peer), not known.without_stub, known.json)


def main(arguments: Sequence[str]) -> int:
    """Measure, print the tables; return the exit status."""
    request = parse(arguments)
    privileged = os.geteuid() == 0
    if privileged and _INSIDE not in os.environ:
        # A mount namespace for the harness: what it mounts ends with it, however it ends.
        argv = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "--",
            sys.executable,
            "-m",
            "bench.plugin",
            *arguments,
        ]
        os.execvpe(argv[0], argv, {**os.environ, _INSIDE: "1"})
    try:
        subjects = _subjects(request, privileged=privileged)
        kubelet, scan = programs.ensure(programs.KUBELET), programs.ensure(programs.SCAN)
        samples, machine = Samples(), _machine(request)
        root = _root(privileged=privileged)
        try:
            lab = measure.Lab(root, kubelet, privileged, request.extent, samples, _say)
            measure.everything(lab, subjects, scan)
        finally:
            _remove(root, privileged=privileged)
    except (BuildFailed, Gone, NotStarted, measure.NothingToMeasure, subprocess.CalledProcessError) as failure:
        print(failure, file=sys.stderr)
        return 1
    machine["took_s"] = round(time.monotonic() - machine.pop("began_s"))
    machine["load_after"] = _load()
    peers = [subject.name for subject in subjects if subject.name != OURS]
    print(f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}")
    print(f"{request.extent.name} run, {machine['took_s']} s, load {machine['load_before']} to {machine['load_after']}")
    if not privileged:
        print("not root: no mount namespace, so ours alone, told where the node is by flags; peers need root")
    print("\n" + report.rendered(samples, peers))
    if request.json is not None:
        request.json.write_text(json.dumps({"machine": machine, "samples": samples.as_json()}, indent=1) + "\n")
    return 0


def _subjects(request: Request, *, privileged: bool) -> list[Subject]:
    subjects = [Subject(OURS, request.ours)]
    if privileged:
        if request.stub:
            subjects.append(Subject(STUB, (str(programs.ensure(programs.STUB)),)))
        subjects.extend(request.peers)
    return subjects


def _root(*, privileged: bool) -> Path:
    """Make a folder in memory, as /sys, /dev and /run are on a node; not below what subjects find something else at."""
    if not privileged:
        return Path(tempfile.mkdtemp(prefix="kd-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    root = Path(tempfile.mkdtemp(prefix="kd-", dir="/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(root)], check=True)
    return root


def _remove(root: Path, *, privileged: bool) -> None:
    if privileged:
        # Quicker than removing some hundred thousand files.
        subprocess.run(["umount", "--lazy", str(root)], check=True)
        root.rmdir()
    else:
        shutil.rmtree(root)


def _machine(request: Request) -> dict[str, Any]:
    model = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": model[0] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "extent": request.extent.name,
        "load_before": _load(),
        "began_s": time.monotonic(),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _load() -> float:
    return round(os.getloadavg()[0], 2)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
