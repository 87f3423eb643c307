"""The model zoo. A family has one import name, `zoo.<family>`, whatever shelf it stands on."""

from pathlib import Path

SHELVES = ("llm", "vlm", "diffusion", "embodied")
__path__ += [str(Path(__file__).parent / shelf) for shelf in SHELVES]
