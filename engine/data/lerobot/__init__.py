"""LeRobot datasets, versions 2.0, 2.1 and 3.0: their metadata, their numbers and exact frames of their videos.

`meta` and `check` are free of torch and PyAV, as the controller reads them.
"""

EXTRA = "embodied"
PACKAGES = ("pyarrow", "av")
STATE, ACTION = "observation.state", "action"  # what LeRobot calls the proprioception and the action
EPISODE, FRAME, INDEX, TIME, TASK = "episode_index", "frame_index", "index", "timestamp", "task_index"
