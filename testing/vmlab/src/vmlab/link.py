# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""The host's end of the line to the guest's agent: requests out, answers back in whatever order they come."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

Answer = Mapping[str, Any]

_CHUNK: Final = 1 << 16


class Link:
    """A connection to the agent's port. The agent may come, go and come again meanwhile."""

    def __init__(self, path: Path) -> None:
        """Connect.

        Raises: OSError when nobody listens yet.
        """
        self.hellos: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        """One for each start of the agent, and None when the line is cut."""
        self._waiting: dict[int, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._next = 0
        self._is_cut = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._listen, name="agent link", daemon=True)
        self._thread.start()

    def ask(self, operation: str, **parameters: Any) -> Future[Answer]:
        """Send a request; its answer, or ConnectionError, comes in the future."""
        answer: Future[Answer] = Future()
        with self._lock:
            if self._is_cut:
                answer.set_exception(ConnectionError("the line to the guest is cut"))
                return answer
            self._next += 1
            self._waiting[self._next] = answer
            line = json.dumps({"id": self._next, "op": operation, **parameters}) + "\n"
            try:
                self._socket.sendall(line.encode())
            except OSError as error:
                self._waiting.pop(self._next).set_exception(ConnectionError(str(error)))
        return answer

    def forget(self, why: str) -> None:
        """End every request that is not answered yet: a guest that starts anew knows nothing of them."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(ConnectionError(why))

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        pending = b""
        with suppress(OSError):
            while received := self._socket.recv(_CHUNK):
                *lines, pending = (pending + received).split(b"\n")
                for line in lines:
                    self._take(line)
        with self._lock:
            self._is_cut = True
        self.forget("the line to the guest is cut")
        self.hellos.put(None)

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return  # half a line of an agent that a reboot cut off
        if "hello" in message:
            self.hellos.put(message)
            return
        with self._lock:
            answer = self._waiting.pop(message["id"], None)
        if answer is not None:
            answer.set_result(message)
