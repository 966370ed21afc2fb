# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps one resource registered with whatever kubelet there is, for ever.

A kubelet that starts removes every socket from its directory and then makes its own. It may come back at once or after
days, it may make only its own socket anew, and a file of that name may be left by a kubelet that was killed. So whoever
is not listened to keeps trying, and a new socket is registered with at once.

Two instances may serve one resource while a DaemonSet rolls. A kubelet up to version 1.35 knows one client per resource:
when the older instance's stream ends it drops the newer one's connection, which is seen here as a lost stream; when the
newer one ends it keeps the older one's stream open and offers nothing, which can't be seen, so the end of another
instance is a reason to register again. Kubelets from 1.36 on know clients by socket path, and refuse a path that they
are connected to, forgetting the connection. So each registration goes out under a socket name never registered before,
and an older socket that is still listened to stays open: closing it would take the new one down on the first kind.

Source: k8s.io/kubernetes v1.34.4 and v1.37.2, pkg/kubelet/cm/devicemanager/plugin/v1beta1 (server.go, handler.go) and
manager.go (PluginConnected, PluginDisconnected); kubernetes issues 121994 and 127803
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from grpclib import GRPCError
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Status

from eventline import EventLog
from kata_device_plugin.events import Event
from kata_device_plugin.server import OPTIONS, ResourceServer, is_socket_name, socket_path
from kata_device_plugin.v1beta1 import deviceplugin_pb2 as pb

API_VERSION: Final = "v1beta1"
KUBELET_SOCKET: Final = "kubelet.sock"
REGISTER: Final = "/v1beta1.Registration/Register"

# Inside Register the kubelet dials back, for up to 10 s.
_REGISTER_TIMEOUT_S: Final = 15.0
# How long a kubelet may take to open its stream after it accepted a registration.
_STREAM_TIMEOUT_S: Final = 10.0
# How soon to register again after the stream ended: at once, and later each time when it does not last.
_FIRST_LOSS_S: Final = 0.1
_LAST_LOSS_S: Final = 30.0
# A kubelet's socket is bound before it listens, so the first connection may be refused.
_FIRST_RETRY_S: Final = 0.005
# Without directory events this is how soon a new kubelet is seen. Only an instance that nobody listens to polls.
_POLL_S: Final = 0.5
# What a kubelet refused once it may refuse again: each further try waits twice as long.
_FIRST_REFUSAL_S: Final = 1.0
_LAST_REFUSAL_S: Final = 30.0
# The kubelet must have seen the other instance's stream end before it is asked again.
_SIBLING_DELAY_S: Final = 0.5

# Older sockets that are still listened to. More than one needs several instances that end one after the other.
_KEPT: Final = 4

_Identity = tuple[int, int, int]


class _Unreachable(Exception):
    """No kubelet was talked to: it is starting, or it went away. Its own message says how that showed."""


class _Refused(Exception):
    """A kubelet answered, and did not take the registration, or did not answer in time."""


@dataclass(slots=True)
class _Patience:
    """How long to wait after which failure, and what has been said already; made anew by each success."""

    retry_s: float = _FIRST_RETRY_S
    refusal_s: float = _FIRST_REFUSAL_S
    said: str = ""

    def is_news(self, reason: str) -> bool:
        """Whether this was not what was said last."""
        news, self.said = reason != self.said, reason
        return news


class Registration:
    """One resource's registration. `run` is the whole of it; the other methods only wake it.

    Reads, connects to: <device-plugin-dir>/kubelet.sock. Writes: the sockets of its servers.
    """

    def __init__(
        self,
        resource: str,
        directory: str,
        prefix: str,
        make_server: Callable[[str, Callable[[], None]], ResourceServer],
        log: EventLog,
        *,
        blind: bool,
    ) -> None:
        """Prepare.

        `make_server` takes the path of a socket, and what to call when a listener comes or goes. `blind` says that no
        directory events will come, so that a kubelet must be looked for all the time.
        """
        self.blind = blind
        self._resource = resource
        self._directory = directory
        self._prefix = prefix
        self._make_server = make_server
        self._kubelet = os.path.join(directory, KUBELET_SOCKET)
        self._log = log
        self._wake = asyncio.Event()
        self._servers: list[ResourceServer] = []
        """The newest last: it is the one to register. The others are still listened to."""
        self._binding = ""
        """The socket that is being made: on disk already, and not among the servers yet."""
        self._siblings: frozenset[str] = frozenset()
        self._again = False
        self._registered: _Identity | None = None
        self._registered_at = float("-inf")
        self._said_heard = False
        self._is_used = False
        """Whether a kubelet may have heard of the newest socket's name."""

    def wake(self) -> None:
        """Look again now: something happened in the directory, or a listener came or went."""
        self._wake.set()

    async def run(self) -> None:
        """Serve, register, and do both again whenever it is needed. Ends by cancellation only."""
        patience, loss_s = _Patience(), _FIRST_LOSS_S
        while True:
            self._wake.clear()
            await self._serve()
            self._say_whether_heard()
            kubelet = _identity(self._kubelet)
            if kubelet is None:
                if patience.is_news("absent"):
                    self._say_absent("there is no socket")
                await self._rest(_POLL_S)
                continue
            if kubelet == self._registered and not self._again:
                if self._is_heard:
                    await self._rest(_POLL_S if self.blind else None)
                    continue
                # Nobody listens: the stream is not open yet, or it ended, with the kubelet or without.
                was_heard = self._servers[-1].was_heard
                if not await self._silent_for(loss_s if was_heard else _STREAM_TIMEOUT_S, kubelet):
                    continue
                lasted_s = self._now() - self._registered_at
                loss_s = min(loss_s * 2, _LAST_LOSS_S) if lasted_s < _LAST_LOSS_S else _FIRST_LOSS_S
            if self._is_used:
                await self._serve(anew=True)
            self._again = False
            try:
                await self._register(kubelet)
            except _Unreachable as error:
                if patience.retry_s >= _POLL_S and patience.is_news("absent"):
                    self._say_absent(str(error))
                await self._rest(patience.retry_s)
                patience.retry_s = min(patience.retry_s * 2, _POLL_S)
            except _Refused as error:
                if patience.is_news(str(error)):
                    self._log.warning(
                        Event.KUBELET_REFUSED,
                        resource=self._resource,
                        reason=str(error),
                        retry_s=patience.refusal_s,
                    )
                if await self._silent_for(patience.refusal_s, kubelet):
                    patience.refusal_s = min(patience.refusal_s * 2, _LAST_REFUSAL_S)
                else:
                    patience.refusal_s = _FIRST_REFUSAL_S
            else:
                patience = _Patience()
                self._registered, self._registered_at = kubelet, self._now()
                endpoint = os.path.basename(self._servers[-1].path)
                self._log.info(Event.KUBELET_REGISTERED, resource=self._resource, endpoint=endpoint)

    def look_for_siblings(self) -> None:
        """Notice instances of the same resource that came or ended; remove the sockets that dead ones left."""
        own = {server.path for server in self._servers} | {self._binding}
        found = set()
        for name in _names(self._directory):
            path = os.path.join(self._directory, name)
            if path in own or not is_socket_name(name, self._prefix):
                continue
            if _is_served(path):
                found.add(path)
            else:
                with suppress(OSError):
                    os.unlink(path)
        gone = self._siblings - found
        self._siblings = frozenset(found)
        for path in sorted(gone):
            self._log.info(Event.SIBLING_GONE, resource=self._resource, path=path)
        if gone:
            loop = asyncio.get_running_loop()
            loop.call_later(_SIBLING_DELAY_S, self._register_again, loop.time())

    def close(self) -> None:
        """End every call and stop listening; the socket files stay, see `unlink`."""
        for server in self._servers:
            server.close()

    def unlink(self) -> None:
        """Remove the own socket files."""
        for server in self._servers:
            server.unlink()

    @property
    def _is_heard(self) -> bool:
        """Whether the kubelet listens where it was registered last; a stream on an older socket does not count."""
        return self._servers[-1].listeners > 0

    def _say_whether_heard(self) -> None:
        if self._said_heard != self._is_heard:
            self._said_heard = self._is_heard
            event = Event.KUBELET_LISTENING if self._said_heard else Event.KUBELET_GONE
            self._log.info(event, resource=self._resource)

    def _say_absent(self, reason: str) -> None:
        self._log.info(
            Event.KUBELET_ABSENT, resource=self._resource, path=self._kubelet, reason=reason, hint="waiting for it"
        )

    def _register_again(self, since: float) -> None:
        """Register again, unless that was done since: which of two instances the kubelet held to be newer is unknown."""
        if self._registered_at < since:
            self._again = True
            self.wake()

    async def _serve(self, *, anew: bool = False) -> None:
        """Make sure that there is a socket of ours before anybody is told of it; `anew`, another one in any case."""
        patience = _Patience()
        while anew or not self._servers or not self._servers[-1].is_reachable():
            # What nobody listens to, or what is no longer on disk, is of no more use.
            kept = [server for server in self._servers if server.listeners and server.is_reachable()][-_KEPT:]
            for server in [server for server in self._servers if server not in kept]:
                self._servers.remove(server)
                server.close()
                server.unlink()
            # What was registered is a file that is gone, or one not to be registered again.
            self._registered, self._is_used = None, False
            fresh = self._make_server(socket_path(self._directory, self._prefix), self.wake)
            self._binding = fresh.path
            try:
                await fresh.serve()
            except OSError as error:
                reason = error.strerror or str(error)
                if patience.is_news(reason):
                    self._log.warning(
                        Event.SOCKET_FAILED,
                        resource=self._resource,
                        path=fresh.path,
                        reason=reason,
                        hint="the directory must exist and be writable for this process; check the mount and SELinux",
                    )
                # No directory yet means no kubelet yet: it makes the directory when it first starts.
                await self._rest(_POLL_S if isinstance(error, FileNotFoundError) else patience.refusal_s)
                self._wake.clear()
                patience.refusal_s = min(patience.refusal_s * 2, _LAST_REFUSAL_S)
            else:
                self._servers.append(fresh)
                return

    async def _register(self, kubelet: _Identity) -> None:
        """Register with the kubelet behind this socket; give up on it when either socket is replaced.

        Raises: _Unreachable, _Refused.
        """
        channel = Channel(path=self._kubelet)
        request = pb.RegisterRequest(
            version=API_VERSION,
            endpoint=os.path.basename(self._servers[-1].path),
            resource_name=self._resource,
            options=OPTIONS,
        )
        method = UnaryUnaryMethod(channel, REGISTER, pb.RegisterRequest, pb.Empty)
        call = asyncio.ensure_future(method(request, timeout=_REGISTER_TIMEOUT_S))
        call.add_done_callback(self._take_note)
        try:
            while not call.done():
                await self._rest(_POLL_S)
                self._wake.clear()
                if call.done():
                    break
                if _identity(self._kubelet) != kubelet:
                    raise _Unreachable("the kubelet's socket was replaced")
                if not self._servers[-1].is_reachable():
                    # The kubelet would dial a name that is gone for all of its 10 s.
                    raise _Unreachable("the own socket was removed")
        finally:
            call.cancel()
            channel.close()
            await asyncio.wait([call])
        # A name that a kubelet may have heard of is not given out again.
        error = call.exception()
        self._is_used = not isinstance(error, ConnectionRefusedError | FileNotFoundError)
        if isinstance(error, GRPCError | TimeoutError):
            raise _Refused(_answer(error)) from error
        if error is not None:
            # Whatever the library makes of a connection that goes away, in the middle of a call or before it.
            raise _Unreachable(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error

    def _take_note(self, call: asyncio.Future[pb.Empty]) -> None:
        """Wake the loop; an error of a call that was given up is nobody else's to report."""
        _ = call.cancelled() or call.exception()
        self.wake()

    async def _silent_for(self, seconds: float, kubelet: _Identity) -> bool:
        """Wait; False as soon as somebody listens, or either socket is not the one that it was."""
        deadline = self._now() + seconds
        while (remaining := deadline - self._now()) > 0:
            await self._rest(min(remaining, _POLL_S))
            self._wake.clear()
            if self._is_heard or _identity(self._kubelet) != kubelet or not self._servers[-1].is_reachable():
                return False
        return True

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _rest(self, seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()


def _answer(error: GRPCError | TimeoutError) -> str:
    if isinstance(error, TimeoutError) or error.status is Status.DEADLINE_EXCEEDED:
        return f"no answer within {_REGISTER_TIMEOUT_S:.0f} s"
    return f"{error.status.name}: {error.message or 'no message'}"


def _identity(path: str) -> _Identity | None:
    """Tell one socket from the next under the same name; the number of a removed inode is soon given out again."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def _is_served(path: str) -> bool:
    """Whether somebody listens on a unix socket; a file whose process died refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
