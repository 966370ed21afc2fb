# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The guest's side of the lab: does what JSON lines on a virtio-serial port ask, one at a time.

A request is {"id": N, "op": NAME, ...}, an answer {"id": N, "ok": true, ...} or {"id": N, "ok": false, "error": TEXT}.
Bytes travel as base64. When the agent starts, it says {"hello": ...} by itself: that is how the host sees a reboot.

Standard library only, for the guest's own CPython.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

PORT: Final = "/dev/virtio-ports/vmlab.agent"
PORT_WAIT_S: Final = 120.0
CHUNK: Final = 1 << 16

Request = dict[str, Any]
Answer = dict[str, Any]


class Agent:
    """Holds the programs that were spawned, by name."""

    def __init__(self) -> None:
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._unread: dict[str, bytes] = {}
        self._operations: dict[str, Callable[[Request], Answer]] = {
            "run": run,
            "put": put,
            "get": get,
            "spawn": self.spawn,
            "tell": self.tell,
            "hear": self.hear,
            "end": self.end,
            "running": self.running,
        }

    def answer(self, request: Request) -> Answer:
        """Do one thing; whatever goes wrong is an answer too."""
        try:
            return {"ok": True, **self._operations[request["op"]](request)}
        except Exception as error:  # noqa: BLE001 - the host decides what is fatal
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def spawn(self, request: Request) -> Answer:
        """Start a program that stays; its standard error goes to a file."""
        name = request["name"]
        if name in self._programs:
            raise ValueError(f"{name} was spawned already")
        with Path(request["stderr"]).open("wb") as stderr:
            self._programs[name] = subprocess.Popen(
                request["argv"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **request.get("env", {})},
            )
        self._unread[name] = b""
        return {"pid": self._programs[name].pid}

    def tell(self, request: Request) -> Answer:
        """Write one line to a program."""
        stdin = self._programs[request["name"]].stdin
        assert stdin is not None
        stdin.write(request["line"].encode() + b"\n")
        stdin.flush()
        return {}

    def hear(self, request: Request) -> Answer:
        """Read one line from a program; None when it ended or time is up."""
        name = request["name"]
        stdout = self._programs[name].stdout
        assert stdout is not None
        deadline_s = time.monotonic() + request["within_s"]
        while b"\n" not in self._unread[name]:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([stdout], [], [], left_s)[0]:
                return {"line": None, "why": "time is up"}
            data = os.read(stdout.fileno(), CHUNK)
            if not data:
                return {"line": None, "why": "it closed its output"}
            self._unread[name] += data
        line, _, self._unread[name] = self._unread[name].partition(b"\n")
        return {"line": line.decode()}

    def end(self, request: Request) -> Answer:
        """Send a signal, wait for the end and forget the program; its exit status as the shell's $? would be."""
        name = request["name"]
        program = self._programs[name]
        program.send_signal(signal.Signals[request["signal"]])
        try:
            status = program.wait(request["within_s"])
        except subprocess.TimeoutExpired:
            return {"status": None}
        for stream in (program.stdin, program.stdout):
            if stream is not None:
                stream.close()
        del self._programs[name], self._unread[name]
        return {"status": status}

    def running(self, request: Request) -> Answer:
        """Whether a program has not ended."""
        return {"running": self._programs[request["name"]].poll() is None}


def run(request: Request) -> Answer:
    """Run a shell command to its end."""
    started_s = time.monotonic()
    ended = subprocess.run(
        ["/bin/bash", "-c", request["command"]],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=request["within_s"],
        check=False,
    )
    return {
        "status": ended.returncode,
        "out": ended.stdout.decode(errors="replace"),
        "err": ended.stderr.decode(errors="replace"),
        "seconds": time.monotonic() - started_s,
    }


def put(request: Request) -> Answer:
    """Write a file, with its folders."""
    path = Path(request["path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b64decode(request["data"]))
    path.chmod(request["mode"])
    return {}


def get(request: Request) -> Answer:
    """Read a file."""
    return {"data": base64.b64encode(Path(request["path"]).read_bytes()).decode()}


def hello() -> Answer:
    """Say who this is."""
    return {
        "hello": os.uname().release,
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "uptime_s": float(Path("/proc/uptime").read_text().split()[0]),
    }


def write_line(port: int, message: Answer) -> None:
    """Write a whole line; a port takes as much as the host has room for."""
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(port, data) :]


def main() -> None:
    """Serve until the machine goes down."""
    deadline_s = time.monotonic() + PORT_WAIT_S
    while not Path(PORT).exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    port = os.open(PORT, os.O_RDWR)
    agent = Agent()
    write_line(port, hello())
    unread = b""
    while True:
        data = os.read(port, CHUNK)
        if not data:
            time.sleep(0.05)  # nobody is connected on the host's side
            continue
        unread += data
        while b"\n" in unread:
            line, _, unread = unread.partition(b"\n")
            if line.strip():
                request = json.loads(line)
                write_line(port, {"id": request["id"], **agent.answer(request)})


if __name__ == "__main__":
    main()
