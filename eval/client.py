"""Asking a policy server. Runs in the environments of simulators too."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Optional

import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.sync.client import connect

from engine.errors import UserError
from eval import protocol

TIMEOUT_S = 120.0


class ServerGone(UserError):
    """The connection ended; another may be made."""


class Client:
    """A connection to a policy server, ours or openpi's."""

    def __init__(self, address: str, token: Optional[str] = None, timeout_s: float = TIMEOUT_S) -> None:
        """UserError if nobody answers, if the token is wrong, or if the server speaks another protocol."""
        self.address = address if "://" in address else f"ws://{address}"
        self.timeout_s = timeout_s
        self._ids = 0
        headers = {"Authorization": f"Api-Key {token}"} if token else None
        try:
            self._socket = connect(
                self.address, compression=None, max_size=protocol.MAX_BYTES, additional_headers=headers, proxy=None
            )
            hello = self._socket.recv(timeout_s)
        except InvalidStatus as error:
            body = (error.response.body or b"").decode(errors="replace").strip()
            raise UserError(f"{self.address}: refused ({body or error.response.status_code})") from None
        except (OSError, InvalidHandshake, InvalidURI, ConnectionClosed, TimeoutError, ValueError) as error:
            raise ServerGone(f"{self.address}: no policy server answers there ({error})") from None
        self.metadata = protocol.unpack(hello)
        self.ours = self.metadata.get("protocol") == protocol.NAME
        if self.ours:
            protocol.check_version(self.metadata.get("version"), f"the server at {self.address}")
        self.limit = int(self.metadata.get("max_bytes") or protocol.MAX_BYTES)

    def infer(self, observation: dict[str, Any], seed: int = 0, session: str = "", step: int = 0) -> dict[str, Any]:
        """The answer to an observation: `actions` [T, D], not yet checked, and the server's timing.

        Raises UserError with the server's words, and ServerGone if the connection is lost.
        """
        self._ids += 1
        envelope = {"version": protocol.VERSION, "id": self._ids, "session": session, "step": step, "seed": seed}
        data = protocol.pack(observation | ({protocol.ENVELOPE: envelope} if self.ours else {}))
        if len(data) > self.limit:
            raise UserError(
                f"the observation takes {len(data)} bytes, and the server at {self.address} takes at most {self.limit}"
            )
        try:
            self._socket.send(data)
            reply = self._socket.recv(self.timeout_s)
        except (ConnectionClosed, OSError) as error:
            raise ServerGone(f"{self.address}: the server closed the connection ({error})") from None
        except TimeoutError:
            raise ServerGone(f"{self.address}: no answer within {self.timeout_s:.0f} s") from None
        if isinstance(reply, str):
            raise UserError(f"the policy says: {reply.strip().splitlines()[-1] if reply.strip() else 'an error'}")
        message = protocol.unpack(reply)
        if self.ours and message.get(protocol.ENVELOPE, {}).get("id") != self._ids:
            raise UserError(f"{self.address}: an answer to another request came")
        return message

    def actions(self, observation: dict[str, Any], size: int, seed: int, session: str, step: int) -> np.ndarray:
        """Checked actions [T, size]."""
        return protocol.checked_actions(self.infer(observation, seed, session, step).get(protocol.ACTIONS), size)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
