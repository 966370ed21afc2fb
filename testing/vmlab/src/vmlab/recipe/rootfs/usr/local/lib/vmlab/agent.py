# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""The guest's end of the lab: does what arrives as JSON lines on a virtio serial port, several things at a time.

Every request has an `id` and an `op`; its answer has the same `id`, and `error` if it could not be done. Without a
request it says hello once, after its start. Standard library only, Python 3.11 or newer.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

PORT = "/dev/virtio-ports/vmlab.agent"
BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Agent:
    """Serves one port until it is closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writing = threading.Lock()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "run": self._run,
            "put": self._put,
            "get": self._get,
            "start": self._start,
            "exchange": self._exchange,
            "signal": self._signal,
            "wait": self._wait,
        }

    def serve(self) -> None:
        """Say hello, then answer until the port ends."""
        with open("/proc/uptime") as uptime, open(BOOT_ID) as boot:
            self._send({"hello": os.uname().release, "uptime_s": float(uptime.read().split()[0]), "boot": boot.read()})
        pending = b""
        while received := os.read(self._port, 1 << 16):
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                # One thread each: a write to sysfs may block for as long as somebody holds a device.
                threading.Thread(target=self._answer, args=(json.loads(line),), daemon=True).start()

    def _answer(self, request: dict[str, Any]) -> None:
        try:
            answer = self._operations[request["op"]](request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        self._send({"id": request["id"], **answer})

    def _send(self, message: dict[str, Any]) -> None:
        line = (json.dumps(message) + "\n").encode()
        with self._writing:
            while line:
                line = line[os.write(self._port, line) :]

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        process = subprocess.Popen(
            request["argv"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **request["env"]},
            start_new_session=True,
        )
        ended = True
        try:
            out, err = process.communicate(timeout=request["timeout_s"])
        except subprocess.TimeoutExpired:
            ended = False
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        return {
            "exit_code": process.returncode if ended else None,
            "stdout": out.decode(errors="replace"),
            "stderr": err.decode(errors="replace"),
        }

    def _put(self, request: dict[str, Any]) -> dict[str, Any]:
        path = Path(request["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(request["content"]))
        path.chmod(request["mode"])
        return {}

    def _get(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"content": base64.b64encode(Path(request["path"]).read_bytes()).decode()}

    def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        with open(request["stderr"], "wb") as stderr:
            process = subprocess.Popen(
                request["argv"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if request["talks"] else stderr,
                stderr=stderr,
                env={**os.environ, **request["env"]},
                start_new_session=True,
            )
        self._processes[process.pid] = process
        return {"pid": process.pid}

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._processes[request["pid"]]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request["line"].encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError(f"process {process.pid} closed its output")
        return {"line": line.decode()}

    def _signal(self, request: dict[str, Any]) -> dict[str, Any]:
        # Popen knows whether the process was waited for, so no other can get the signal.
        self._processes[request["pid"]].send_signal(request["signal"])
        return {}

    def _wait(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"exit_code": self._processes[request["pid"]].wait(request["timeout_s"])}
        except subprocess.TimeoutExpired:
            return {"exit_code": None}


if __name__ == "__main__":
    Agent(os.open(PORT, os.O_RDWR)).serve()
