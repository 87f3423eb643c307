"""LIBERO as it is played: the package is imported when the first task opens, in a process without torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import numpy as np

from engine.errors import UserError
from engine.policy.convert import axis_angle_of_quaternion
from eval.conversions import flip_image
from eval.simulator import Observation

REST = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float64)  # while objects settle, the gripper open
RENDERED = "vertical"  # OpenGL's rows begin at the bottom
PACKAGES = {"egl": "libegl1 libegl-mesa0 libgl1-mesa-dri", "osmesa": "libosmesa6"}


class Libero:
    """A suite of LIBERO, one task open at a time (opening one takes seconds)."""

    def __init__(self, setup: dict[str, Any]) -> None:
        """`setup` as `eval.presets.Setup`. UserError without the package, the suite or a GL backend."""
        self.setup = setup
        self._task: Optional[int] = None
        self._env: Any = None
        self._look = True
        try:
            from libero.libero import benchmark
        except ImportError as error:
            raise UserError(
                f"LIBERO is not installed in this environment ({error}); `zoo eval-env libero` builds one that has it"
            ) from None
        suites = benchmark.get_benchmark_dict()
        if setup["suite"] not in suites:
            raise UserError(f"suite={setup['suite']}: this LIBERO has {', '.join(sorted(suites)[:12])}, ...")
        self.suite = suites[setup["suite"]]()

    def instruction(self, task: int) -> str:
        """The task's words."""
        return str(self.suite.get_task(task).language)

    def reset(self, task: int, episode: int, seed: int, look: bool) -> Observation:
        """Official initial state `episode` of a task, after the settling steps.

        The simulator is seeded before each episode, so that an episode does not depend on which were played before.
        """
        if task != self._task:
            self._open(task)
        states = self._states
        if not 0 <= episode < len(states):
            raise UserError(f"episode {episode}: task {task} has {len(states)} initial states, from 0")
        self._env.seed(seed)
        self._look = look
        self._env.reset()
        self._gate_cameras()
        values = self._env.set_init_state(states[episode])
        for number in range(self.setup["settle"]):
            self._look = look and number == self.setup["settle"] - 1
            values, *_ = self._env.step(REST)
        return self._observation(values, look, False)

    def step(self, action: np.ndarray, look: bool) -> Observation:
        """One action [7] at 20 Hz."""
        self._look = look
        values, _, done, _ = self._env.step(np.asarray(action, dtype=np.float64))
        return self._observation(values, look, bool(done))

    def privileged(self) -> dict[str, Any]:
        """Positions and rotations (xyzw) of the objects, and which of them the task is about, in its order."""
        given = self._values
        ends = [name[: -len("_pos")] for name in given if name.endswith("_pos") and not name.startswith("robot0")]
        names = [name for name in ends if f"{name}_quat" in given]
        poses = {n: np.concatenate([given[f"{n}_pos"], given[f"{n}_quat"]]) for n in names}
        return {"poses": poses, "objects": list(self._env.obj_of_interest)}

    def close(self) -> None:
        """Close the open task."""
        if self._env is not None:
            self._env.close()
        self._env = self._task = None

    def _open(self, task: int) -> None:
        from libero.libero import get_libero_path
        from libero.libero.envs.env_wrapper import ControlEnv

        self.close()
        cameras = list(self.setup["cameras"].values())
        if cameras:
            _set_multisampling(self.setup["multisampling"])
        found = self.suite.get_task(task)
        try:
            self._env = ControlEnv(
                bddl_file_name=str(Path(get_libero_path("bddl_files")) / found.problem_folder / found.bddl_file),
                use_camera_obs=bool(cameras),
                has_offscreen_renderer=bool(cameras),
                camera_names=cameras or ["agentview"],
                camera_heights=self.setup["resolution"],
                camera_widths=self.setup["resolution"],
                ignore_done=True,  # the runner knows the horizon
            )
        except Exception as error:
            if not cameras:
                raise
            backend = os.environ.get("MUJOCO_GL", "egl")
            raise UserError(
                f"MUJOCO_GL={backend} cannot draw here ({type(error).__name__}: {error}); install "
                f"{PACKAGES.get(backend, PACKAGES['egl'])}, or set MUJOCO_GL to one of {', '.join(PACKAGES)}"
            ) from None
        self._states = self.suite.get_task_init_states(task)
        self._task = task

    def _gate_cameras(self) -> None:
        """Draw only for the steps that are looked at. The sensors keep their clocks, so the images are the same."""
        for camera in self.setup["cameras"].values():
            sensor = self._env.env._observables[f"{camera}_image"]
            sensor._sensor = self._gated(sensor._sensor)

    def _gated(self, draw: Callable[[Any], Any]) -> Callable[[Any], Any]:
        last: list[Any] = []

        def look(cache: Any) -> Any:
            if self._look or not last:
                last[:] = [draw(cache)]
            return last[0]

        look.__modality__ = draw.__modality__  # type: ignore[attr-defined]
        return look

    def _observation(self, values: Any, look: bool, success: bool) -> Observation:
        self._values = values
        rotation = axis_angle_of_quaternion(values["robot0_eef_quat"])
        state = np.concatenate([values["robot0_eef_pos"], rotation, values["robot0_gripper_qpos"]])
        images = {}
        if look:
            for name, camera in self.setup["cameras"].items():
                images[name] = flip_image(values[f"{camera}_image"], RENDERED, self.setup["flip"])
        return Observation(state.astype(np.float32), images, success)


def _set_multisampling(on: bool) -> None:
    """Without it a picture takes half the time; robosuite offers no setting."""
    from robosuite.utils import binding_utils

    context = binding_utils.MjRenderContext
    if on or getattr(context, "_single_sampled", False):
        return
    begin = context.__init__

    def start(self: Any, sim: Any, *args: Any, **kwargs: Any) -> None:
        sim.model._model.vis.quality.offsamples = 0
        begin(self, sim, *args, **kwargs)

    context.__init__ = start
    context._single_sampled = True
