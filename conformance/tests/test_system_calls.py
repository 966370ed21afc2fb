# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""What the plugin asks of the kernel in a life of its own, as strace sees it: libraries and C extensions included."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from simnode import boards, tree

_TRACED = "%process,%file,%network,ioctl,memfd_create,fchmod,ftruncate,pwrite64"
_CALL = re.compile(r"^\d+ +(?:\[pid +\d+\] )?([a-z0-9_]+)\((.*)$")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[str, str]], Path]:
    """Run the plugin through start, a device that leaves and returns, and its end; return its calls and its root."""
    strace = shutil.which("strace")
    assert strace, "strace is missing; install it, nothing is skipped here"
    root = tmp_path_factory.mktemp("s")
    live = tree.LiveNode.create(root / "node", boards.hgx_h100())
    (root / "dp").mkdir()
    log = root / "calls"
    process = subprocess.Popen(
        [
            strace, "-f", "-qq", "-s", "300", "-o", str(log), "-e", f"trace={_TRACED}",
            sys.executable, "-B", "-m", "kata_device_plugin", "--sysfs", str(live.sysfs), "--dev-vfio",
            str(live.dev_vfio), "--device-plugin-dir", str(root / "dp"), "--cdi-dir", str(root / "cdi"),
            "--cdi-static-dir", str(root / "etc"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    pid, returned = 0, False
    for line in process.stderr:
        said = json.loads(line)
        if said["event"] == "run.started":
            pid = int(said["pid"])
        elif said["event"] == "kubelet.absent" and said["resource"] == "nvidia.com/gpu":
            live.unbind("0000:1b:00.0")
        elif said["event"] == "device.left":
            live.bind("0000:1b:00.0")
            returned = True
        elif returned and said["event"] == "cdi.written":
            break
    os.kill(pid, signal.SIGTERM)
    last = process.communicate(timeout=30)[1].splitlines()[-1]
    assert json.loads(last)["exit_code"] == 0
    found = []
    for line in log.read_text().splitlines():
        match = _CALL.match(line)
        if match and ") = -1 E" not in line:
            found.append((match[1], match[2]))
    return found, root


def test_one_program_is_executed_and_no_process_or_thread_is_made(calls: tuple[list[tuple[str, str]], Path]) -> None:
    names = [name for name, _ in calls[0]]
    assert names.count("execve") == 1
    assert {"fork", "vfork", "clone", "clone3"} & set(names) == set()


def test_every_socket_is_a_unix_socket(calls: tuple[list[tuple[str, str]], Path]) -> None:
    sockets = [arguments for name, arguments in calls[0] if name in {"socket", "socketpair"}]
    assert sockets
    assert all(arguments.startswith("AF_UNIX,") for arguments in sockets), sockets
    bound = [arguments for name, arguments in calls[0] if name in {"bind", "connect"}]
    assert all("AF_UNIX" in arguments for arguments in bound), bound
    sent = [arguments for name, arguments in calls[0] if name in {"sendto", "sendmsg"}]
    assert all("sa_family" not in arguments for arguments in sent), sent


def test_nothing_is_opened_for_writing_or_changed_outside_of_two_directories(
    calls: tuple[list[tuple[str, str]], Path],
) -> None:
    found, root = calls
    allowed = (f'"{root}/cdi', f'"{root}/dp/')
    writing = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC")
    changing = {
        "mkdir",
        "rename",
        "unlink",
        "unlinkat",
        "rmdir",
        "symlink",
        "link",
        "chmod",
        "chown",
        "mknod",
        "truncate",
    }
    touched = [
        arguments
        for name, arguments in found
        if name in changing or (name in {"open", "openat"} and writing.search(arguments))
    ]
    assert touched
    outside = [arguments for arguments in touched if not any(place in arguments for place in allowed)]
    # CPython opens /dev/null or a terminal in no path taken here.
    assert outside == []


def test_no_device_node_is_ever_opened(calls: tuple[list[tuple[str, str]], Path]) -> None:
    opened = [arguments for name, arguments in calls[0] if name in {"open", "openat"}]
    assert [arguments for arguments in opened if re.search(r"/vfio/(devices/)?(vfio)?\d", arguments)] == []
