"""A policy behind a websocket, for our runner, for openpi's client, and for a robot."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from types import TracebackType
from typing import Any, Optional

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request as Opening
from websockets.http11 import Response

from engine.errors import UserError
from engine.judging import ServerSettings
from eval import protocol
from eval.batching import Batcher
from eval.policy import Policy, Request
from eval.settings import serving_problems

WHOLE = (int,)


def check_settings(settings: ServerSettings) -> None:
    """UserError for settings that cannot be served, or should not."""
    if problems := list(serving_problems(settings)):
        raise UserError("\n".join(problems))


class Server:
    """Serves one policy until it is stopped. Nothing that a client sends ends it."""

    def __init__(self, policy: Policy, settings: ServerSettings, log: Callable[[str], None] = print) -> None:
        check_settings(settings)
        self.policy, self.settings, self.log = policy, settings, log
        self.clients = 0
        self.limit = int(settings.max_message_mb * 2**20)
        self._numbers = itertools.count(1)

    async def run(self, ready: Callable[[int], None], stop: asyncio.Event) -> None:
        """Serve until `stop`; `ready` gets the port. UserError if it is taken."""
        self.batcher = Batcher(self.policy, self.settings.max_batch, self.settings.max_wait_ms / 1e3)
        work = asyncio.create_task(self.batcher.run())
        place = f"{self.settings.host}:{self.settings.port}"
        try:
            server = await serve(
                self._connection,
                self.settings.host,
                self.settings.port,
                compression=None,
                max_size=self.limit,
                process_request=self._admit,
                ping_timeout=None,  # a simulator that renders answers no pings
            )
        except OSError as error:
            work.cancel()
            raise UserError(f"cannot listen on {place}: {error.strerror or error}; port=0 takes a free one") from None
        async with server:
            ready(next(iter(server.sockets)).getsockname()[1])
            await stop.wait()
        work.cancel()
        self.batcher.close()

    def hello(self) -> dict[str, Any]:
        """What a client is told first."""
        return {
            "protocol": protocol.NAME,
            "version": protocol.VERSION,
            "policy": self.policy.name,
            "conventions": dataclasses.asdict(self.policy.conventions),
            "needs": list(self.policy.needs),
            "max_bytes": self.limit,
        }

    def _admit(self, connection: ServerConnection, opening: Opening) -> Optional[Response]:
        if opening.path == "/healthz":
            return connection.respond(HTTPStatus.OK, "OK\n")
        token = self.settings.token
        if token and not hmac.compare_digest(
            opening.headers.get("Authorization", "").encode(), f"Api-Key {token}".encode()
        ):
            return connection.respond(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong\n")
        if self.clients >= self.settings.max_clients:
            return connection.respond(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{self.clients} clients are connected, and no more are taken\n"
            )
        return None

    async def _connection(self, socket: ServerConnection) -> None:
        number, sessions = next(self._numbers), set[str]()
        self.clients += 1
        self.batcher.connections += 1
        try:
            await socket.send(protocol.pack(self.hello()))
            for count in itertools.count():
                data = await socket.recv()
                await socket.send(await self._reply(data, number, count, sessions))
        except ConnectionClosed as closed:
            if closed.sent and closed.sent.code == 1009:
                self.log(f"client {number}: a message was beyond the limit of {self.limit} bytes; disconnected")
        finally:
            self.clients -= 1
            self.batcher.connections -= 1
            for session in sessions:
                with suppress(Exception):
                    await self.batcher.forget(session)

    async def _reply(self, data: bytes | str, number: int, count: int, sessions: set[str]) -> bytes | str:
        """The answer to a message; text, as openpi's client expects it, if there is none."""
        started = time.perf_counter()
        try:
            message = protocol.unpack(data)
            envelope = self._envelope(message.pop(protocol.ENVELOPE, None))
            session = f"{number}/{envelope.get('session', '')}"
            for old in sessions - {session}:  # a connection plays one episode at a time
                await self.batcher.forget(old)
            sessions &= {session}
            sessions.add(session)
            seed = envelope.get("seed", self.settings.seed + count)
            request = Request(message, seed, session, envelope.get("step", count))
            actions, seconds = await self.batcher.infer(request)
        except UserError as error:
            self.log(f"client {number}: {error}")
            return str(error)
        answer = {
            protocol.ACTIONS: actions,
            "server_timing": {"infer_ms": 1e3 * (time.perf_counter() - started)},
            "policy_timing": {"infer_ms": 1e3 * seconds},
        }
        return protocol.pack(answer | ({protocol.ENVELOPE: {"id": envelope.get("id")}} if envelope else {}))

    @staticmethod
    def _envelope(envelope: Any) -> dict[str, Any]:
        if envelope is None:
            return {}
        if not isinstance(envelope, dict):
            raise protocol.ProtocolError(f"{protocol.ENVELOPE} must be a map")
        protocol.check_version(envelope.get("version"), "the client")
        for key, kinds in (("seed", WHOLE), ("step", WHOLE), ("session", (str,))):
            if type(envelope.get(key)) not in kinds:
                raise protocol.ProtocolError(
                    f"{protocol.ENVELOPE}.{key} must be {'text' if key == 'session' else 'a whole number'}"
                )
        return envelope


class Background:
    """A server in a thread of this process, for a runner and for tests: `with Background(policy) as address`."""

    def __init__(
        self, policy: Policy, settings: Optional[ServerSettings] = None, log: Callable[[str], None] = lambda _: None
    ) -> None:
        self.server = Server(policy, settings or ServerSettings(port=0), log)
        self.port = 0
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="policy-server", daemon=True)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await self.server.run(self._listening, self._stop)

    def _listening(self, port: int) -> None:
        self.port = port
        self._ready.set()

    def __enter__(self) -> Background:
        self._thread.start()
        self._ready.wait()
        if self._error:
            raise self._error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    @property
    def address(self) -> str:
        """Where clients connect."""
        host = self.server.settings.host
        return f"ws://{f'[{host}]' if ':' in host else host}:{self.port}"
