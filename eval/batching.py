"""Requests of many connections, answered in batches outside of the event loop."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from engine.errors import UserError
from eval import protocol
from eval.policy import Policy, Request

Waiting = tuple[Request, "asyncio.Future[tuple[np.ndarray, float]]"]


class Batcher:
    """One thread runs the policy. A batch closes when it is full, when every connection has asked, or in time."""

    def __init__(self, policy: Policy, max_batch: int, max_wait_s: float) -> None:
        self.policy, self.max_batch, self.max_wait_s = policy, max_batch, max_wait_s
        self.connections = 0
        self.batches: dict[int, int] = {}  # how many there were of each size
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "policy")

    async def infer(self, request: Request) -> tuple[np.ndarray, float]:
        """Actions [T, D] and the seconds that the batch took. UserError in one line if the policy cannot answer."""
        future: asyncio.Future[tuple[np.ndarray, float]] = asyncio.get_running_loop().create_future()
        await self._queue.put((request, future))
        return await future

    async def forget(self, session: str) -> None:
        """Tell the policy, in its thread, that a session is over."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self.policy.forget, session)

    async def run(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._queue.get()]
            until = loop.time() + self.max_wait_s
            while len(batch) < min(self.max_batch, max(1, self.connections)):
                try:
                    batch.append(await asyncio.wait_for(self._queue.get(), max(0.0, until - loop.time())))
                except asyncio.TimeoutError:
                    break
            batch = [item for item in batch if not item[1].cancelled()]
            if not batch:
                continue
            answers = await loop.run_in_executor(self._thread, self._answer, [request for request, _ in batch])
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.cancelled():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    def _answer(self, requests: list[Request]) -> list[tuple[np.ndarray, float] | Exception]:
        """An answer or an error for each: one bad observation must not spoil the others' answers."""
        self.batches[len(requests)] = self.batches.get(len(requests), 0) + 1
        started = time.perf_counter()
        try:
            given = self.policy.infer(requests)
            if len(given) != len(requests):
                raise RuntimeError(f"{len(given)} answers to {len(requests)} requests")
        except Exception as error:
            if len(requests) == 1:
                return [error if isinstance(error, UserError) else UserError(f"{type(error).__name__}: {error}")]
            return [self._answer([request])[0] for request in requests]
        seconds = time.perf_counter() - started
        return [self._checked(actions, seconds) for actions in given]

    def _checked(self, actions: np.ndarray, seconds: float) -> tuple[np.ndarray, float] | Exception:
        try:
            return protocol.checked_actions(actions, self.policy.conventions.action.size or None), seconds
        except UserError as error:
            return error

    def close(self) -> None:
        """End the thread when its batch is done."""
        self._thread.shutdown(wait=False, cancel_futures=True)
