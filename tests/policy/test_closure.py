# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""What the plugin's installed closure is and can do, judged on wheels that are built here.

Three ways, since none sees everything: what the wheels say they need, what stands in their source, and what a run of
them does (by the interpreter's audit events). The conformance suite watches system calls as well.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from simnode import boards, tree

REPOSITORY = Path(__file__).parents[2]
OURS = ("eventline", "pcifacts", "kata-device-plugin")

# What else is in the image, and why it may be.
THIRD_PARTY = {
    "grpclib": "gRPC over asyncio, server and client",
    "h2": "HTTP/2, for grpclib",
    "hpack": "header compression, for h2",
    "hyperframe": "HTTP/2 frames, for h2",
    "multidict": "metadata of calls, for grpclib",
    "protobuf": "messages of the kubelet's protocol",
    "pyyaml": "reads CDI files that others wrote in YAML",
}

# Modules that start processes, map memory, call C, or speak to a network, and the ones of ours that may import them.
DOORS: dict[str, set[str]] = {
    "subprocess": set(),
    "multiprocessing": set(),
    "pty": set(),
    "mmap": set(),
    "cffi": set(),
    "fcntl": set(),
    "ctypes": {"kata_device_plugin.inotify"},
    "socket": {"kata_device_plugin.server", "kata_device_plugin.registration"},
    "ssl": set(),
    "http": set(),
    "urllib": set(),
    "ftplib": set(),
    "smtplib": set(),
    "socketserver": set(),
    "xmlrpc": set(),
    "shutil": set(),
    "tempfile": set(),
    "importlib": set(),
    "pickle": set(),
}

# Functions of os that change something or start something, and the modules that may call them.
CALLS: dict[str, set[str]] = {
    "write": {"kata_device_plugin.cdi"},
    "rename": {"kata_device_plugin.cdi"},
    "makedirs": {"kata_device_plugin.cdi"},
    "fchmod": {"kata_device_plugin.cdi"},
    "fsync": {"kata_device_plugin.cdi"},
    "unlink": {"kata_device_plugin.cdi", "kata_device_plugin.server", "kata_device_plugin.registration"},
}
HARMLESS = {
    "close", "fsdecode", "fsencode", "getpid", "listdir", "lstat", "major", "minor", "open", "path", "read", "readlink",
    "stat", "strerror", "urandom", "access", "fspath",
}  # fmt: skip


@dataclass(frozen=True)
class Module:
    """One module of ours, as it stands in a wheel."""

    name: str
    source: ast.Module


@dataclass(frozen=True)
class Wheels:
    """The wheels of ours, unpacked side by side."""

    site: Path
    modules: tuple[Module, ...]
    metadata: dict[str, Message]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    built, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    for name in OURS:
        code = f"from hatchling.build import build_wheel; build_wheel({str(built)!r})"
        subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY / "packages" / name, check=True, capture_output=True
        )
    for wheel in built.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    modules = tuple(
        Module(".".join(path.relative_to(site).with_suffix("").parts), ast.parse(path.read_bytes()))
        for path in sorted(site.rglob("*.py"))
    )
    metadata = {
        str(canonicalize_name(path.parent.name.split("-")[0])): Parser().parsestr(path.read_text())
        for path in site.glob("*.dist-info/METADATA")
    }
    return Wheels(site, modules, metadata)


def requirements(metadata: Message) -> set[str]:
    found = {Requirement(line) for line in metadata.get_all("Requires-Dist") or ()}
    return {
        canonicalize_name(requirement.name)
        for requirement in found
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def test_the_closure_is_three_wheels_of_ours_and_seven_of_others(wheels: Wheels) -> None:
    closure, ahead = set[str](), {"kata-device-plugin"}
    while ahead:
        name = ahead.pop()
        closure.add(name)
        if name in wheels.metadata:
            ahead |= requirements(wheels.metadata[name]) - closure
        else:
            found = Parser().parsestr(distribution(name).read_text("METADATA") or "")
            ahead |= requirements(found) - closure
    assert closure == {*OURS, *THIRD_PARTY}


def test_the_locked_file_holds_exactly_the_third_party_closure() -> None:
    locked = re.findall(r"^([a-zA-Z0-9_.-]+)==", (REPOSITORY / "requirements/plugin.txt").read_text(), re.MULTILINE)
    # typing-extensions is multidict's, for Python before 3.11.
    assert {canonicalize_name(name) for name in locked} - {"typing-extensions"} == set(THIRD_PARTY)


def imports(module: Module) -> Iterator[str]:
    for node in ast.walk(module.source):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("door", DOORS)
def test_each_door_is_used_by_the_modules_that_may_and_by_no_other(door: str, wheels: Wheels) -> None:
    assert {module.name for module in wheels.modules if door in imports(module)} == DOORS[door]


def test_our_modules_call_nothing_of_os_that_changes_the_machine_but_where_files_are_written(wheels: Wheels) -> None:
    users: dict[str, set[str]] = {}
    for module in wheels.modules:
        for node in ast.walk(module.source):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                users.setdefault(node.attr, set()).add(module.name)
            # "from os import x" and aliases would hide a call from this test.
            assert not (isinstance(node, ast.Import) and any(a.name == "os" and a.asname for a in node.names))
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                assert {alias.name for alias in node.names} <= {"strerror"}
    constants = {name for name in users if name.startswith(("O_", "R_"))}
    assert {name: who for name, who in users.items() if name not in HARMLESS | constants} == CALLS


def test_files_are_opened_for_writing_in_one_module_only(wheels: Wheels) -> None:
    writers = set()
    for module in wheels.modules:
        for node in ast.walk(module.source):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called == "os.open" and "O_RDONLY" not in ast.unparse(node.args[1]):
                writers.add(module.name)
            if called == "open":
                assert [ast.unparse(argument) for argument in node.args[1:2]] == ["'rb'"], module.name
            assert called not in {"eval", "exec", "__import__", "compile"}, module.name
            assert not called.endswith((".write_text", ".write_bytes", ".symlink_to", ".touch")), module.name
    assert writers == {"kata_device_plugin.cdi"}


def test_sockets_are_unix_sockets_by_construction(wheels: Wheels) -> None:
    seen = set()
    for module in wheels.modules:
        for node in ast.walk(module.source):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called == "socket.socket":
                assert ast.unparse(node.args[0]) == "socket.AF_UNIX", module.name
                seen.add(called)
            if called == "Channel":
                assert not node.args
                assert {keyword.arg for keyword in node.keywords} == {"path"}, module.name
                seen.add(called)
            if called == "server.start":
                assert not node.args
                assert {keyword.arg for keyword in node.keywords} == {"sock"}, module.name
                seen.add(called)
            assert "create_connection" not in called, module.name
            assert "create_server" not in called, module.name
    assert seen == {"socket.socket", "Channel", "server.start"}


AUDITED = """
import os, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
busy = False
def hook(event, arguments):
    global busy
    if busy or event.split(".")[0] in {"compile", "exec", "import", "object", "marshal", "code", "builtins", "cpython"}:
        return
    busy = True
    try:
        os.write(log, (event + "\\t" + "\\t".join(map(repr, arguments)) + "\\n").encode(errors="replace"))
    finally:
        busy = False
sys.path[:] = sys.argv[2:4] + [path for path in sys.path if path]
sys.addaudithook(hook)
from kata_device_plugin import cli
sys.exit(cli.main(sys.argv[4:]))
"""

# Events that no run of the plugin may raise.
NEVER = (
    "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system", "os.spawn", "pty.", "mmap.", "os.kill",
    "os.mkfifo", "os.chown", "os.link", "os.symlink", "os.truncate", "os.putenv", "os.setxattr", "shutil.",
    "socket.gethostbyname", "socket.getaddrinfo", "socket.sendto", "ctypes.call_function", "ctypes.cdata",
    "urllib.", "http.", "ftplib.", "smtplib.", "fcntl.",
)  # fmt: skip


@dataclass(frozen=True)
class Audited:
    """What one run did."""

    events: tuple[tuple[str, tuple[str, ...]], ...]
    allowed: tuple[str, ...]


@pytest.fixture(scope="session")
def audited(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """Run the unpacked wheels, with nothing else of ours importable, until their lists and sockets are there."""
    root = tmp_path_factory.mktemp("a")
    live = tree.LiveNode.create(root / "node", boards.hgx_h100())
    others = root / "others"
    others.mkdir()
    for name in THIRD_PARTY:
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top != ".." and not (others / top).exists():
                (others / top).symlink_to(Path(str(distribution(name).locate_file(top))).resolve())
    plugins, cdi, log = root / "dp", root / "cdi", root / "audit"
    plugins.mkdir()
    process = subprocess.Popen(
        [
            sys.executable, "-I", "-B", "-S", "-c", AUDITED, str(log), str(wheels.site), str(others),
            "--sysfs", str(live.sysfs), "--dev-vfio", str(live.dev_vfio), "--device-plugin-dir", str(plugins),
            "--cdi-dir", str(cdi), "--cdi-static-dir", str(root / "etc"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    wanted = {"kubelet.absent": 2, "cdi.written": 3, "device.unhealthy": 1}
    try:
        for line in process.stderr:
            event = json.loads(line)["event"]
            assert event != "run.finished", line
            if event in wanted:
                wanted[event] -= 1
            if event == "kubelet.absent" and not wanted[event]:
                live.unbind("0000:1b:00.0")
            if not any(count > 0 for count in wanted.values()):
                break
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=20)[1]
    finally:
        process.kill()
        process.wait()
    assert json.loads(rest.splitlines()[-1])["exit_code"] == 0
    assert process.returncode == 0
    lines = (line.split("\t") for line in log.read_text().splitlines())
    return Audited(tuple((line[0], tuple(line[1:])) for line in lines), (str(plugins), str(cdi)))


def test_the_wheels_run_with_nothing_but_their_closure(audited: Audited) -> None:
    assert any(event == "socket.bind" for event, _ in audited.events)


def test_a_run_never_starts_a_process_maps_memory_or_resolves_a_name(audited: Audited) -> None:
    raised = {event for event, _ in audited.events}
    assert {event for event in raised if event.startswith(NEVER)} == set()


def test_a_run_writes_below_the_cdi_and_the_plugin_directory_only(audited: Audited) -> None:
    written = set()
    for event, arguments in audited.events:
        if (event == "open" and int(arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) or event in {
            "os.rename",
            "os.remove",
            "os.mkdir",
            "os.rmdir",
        }:
            written.add(ast.literal_eval(arguments[0]))
    assert written, "the run wrote its CDI files, so something must have been seen"
    assert {path for path in written if not str(path).startswith(audited.allowed)} == set()


def test_every_socket_of_a_run_is_a_unix_socket(audited: Audited) -> None:
    families = {arguments[1] for event, arguments in audited.events if event == "socket.__new__"}
    assert families
    assert all("AF_UNIX" in family or family == "1" for family in families), families
    addresses = {arguments[1] for event, arguments in audited.events if event in {"socket.bind", "socket.connect"}}
    assert all(ast.literal_eval(address).startswith(audited.allowed[0]) for address in addresses), addresses
