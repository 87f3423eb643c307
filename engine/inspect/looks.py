"""What a run was asked to look at in its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from engine.backends.base import Backend
from engine.context import Context
from engine.inspect.layers import LayerDump
from engine.inspect.profiler import Profiler


class Looks:
    """The profiler and the layers' statistics around the steps of one command; nothing unless asked for."""

    def __init__(self, context: Context, backend: Backend, start: int, say: Callable[[str], None]) -> None:
        """`start`: the step that the run goes on from. `say` gets what the user should read."""
        run, rank = context.run, context.rank
        self._profiler: Profiler | None = None
        self._layers: LayerDump | None = None
        if run.profile.name == "true":
            chosen, end = run.profile.steps, run.schedule.steps
            self._profiler = Profiler(chosen, start, end, context.hardware, context.run_dir, rank, say)
        if run.debug.dump == "layers":
            self._layers = LayerDump(backend.modules(), run.debug.steps, context.comm, context.run_dir)
            if rank == 0:
                self._layers.resume(start)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around a step. Collective."""
        with ExitStack() as stack:
            if self._layers is not None:
                stack.enter_context(self._layers.watch(step))
            if self._profiler is not None:
                stack.enter_context(self._profiler.step(step))
            yield

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.close()
