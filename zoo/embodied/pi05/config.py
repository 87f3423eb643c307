"""Pi0.5's config keys: lerobot's published ones, with the sizes that its variants stand for. Free of torch.

A published `config.json` names variants (`gemma_2b`, `gemma_300m`); here their numbers are keys of their own, called as
in openpi's `gemma.Config`, so that there can be other sizes. They are read and written as variants where they are some.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from engine.schema import ModelConfig

# Numbers of lerobot 0.6.1's and openpi's `get_config`.
VARIANTS = {
    "gemma_2b": {"width": 2048, "mlp_dim": 16384, "depth": 18, "num_heads": 8, "num_kv_heads": 1, "head_dim": 256},
    "gemma_300m": {"width": 1024, "mlp_dim": 4096, "depth": 18, "num_heads": 8, "num_kv_heads": 1, "head_dim": 256},
}
PREFIXES = {"paligemma_variant": "", "action_expert_variant": "expert_"}  # of the keys that have a variant's numbers
OWN = ("width", "mlp_dim")  # of each of the two; the rest they share, since they attend together
VISION = {"vision_width": 1152, "vision_mlp_dim": 4304, "vision_depth": 27, "vision_heads": 16, "patch_size": 14}
FIXED = VISION | {"vocab_size": 257152}  # that lerobot's config has no keys for
SIZES = ("depth", "num_heads", "num_kv_heads", "head_dim", "width", "mlp_dim", "expert_width", "expert_mlp_dim")
NOT_LEROBOTS = {*SIZES, *FIXED, "image_size", "discrete_state_input", "model_type", "architectures"}


@dataclass
class Pi05Config(ModelConfig):
    """The keys of a model; those of lerobot's that concern its own training loop are not among them."""

    NOT_PUBLISHED: ClassVar[tuple[str, ...]] = ("initializer_range",)

    model_type: Optional[str] = "pi05"
    depth: int = 18  # layers of the language model, and of the expert
    num_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 256
    width: int = 2048  # of the language model
    mlp_dim: int = 16384
    expert_width: int = 1024  # of the action expert
    expert_mlp_dim: int = 4096
    vocab_size: int = 257152
    vision_width: int = 1152  # SigLIP So400m/14
    vision_mlp_dim: int = 4304
    vision_depth: int = 27
    vision_heads: int = 16
    patch_size: int = 14
    image_size: int = 224  # images are resized to this square, with black bars
    chunk_size: int = 50  # actions of a chunk
    max_action_dim: int = 32  # shorter actions are filled up with zeros
    max_state_dim: int = 32
    num_inference_steps: int = 10  # Euler steps from noise to actions
    time_sampling_beta_alpha: float = 1.5  # training times are scale * Beta(alpha, beta) + offset
    time_sampling_beta_beta: float = 1.0
    time_sampling_scale: float = 0.999
    time_sampling_offset: float = 0.001
    min_period: float = 4e-3  # of the sines that a time is told with
    max_period: float = 4.0
    tokenizer_max_length: int = 200  # tokens of a prompt; longer ones are cut
    discrete_state_input: bool = True  # the state is told in the prompt, in 256 steps; openpi's pi05_libero has none
    initializer_range: float = 0.02

    @property
    def horizon(self) -> int:
        """Actions of a chunk, under the name that the data knows."""
        return self.chunk_size

    @property
    def patches(self) -> int:
        """Tokens of an image."""
        return (self.image_size // self.patch_size) ** 2

    @staticmethod
    def fresh_value(name: str) -> Optional[str]:
        """First values of another kind than usual: Gemma keeps a norm's weight less 1, adaRMS begins as a plain norm
        whose layer adds nothing (as openpi's), and nothing reads the output heads.
        """
        plain_norm = name.endswith("norm.weight") and "vision_tower" not in name
        return "zeros" if plain_norm or ".dense." in name or name.endswith("lm_head.weight") else None

    @staticmethod
    def respell(published: dict[str, Any]) -> dict[str, Any]:
        """Variants as their numbers, `image_resolution` as one. ValueError for what no such model has."""
        found = dict(published)
        for key, prefix in PREFIXES.items():
            name = found.get(key)
            if name is None:
                continue
            if name not in VARIANTS:
                raise ValueError(f"{key}={name!r}; {', '.join(VARIANTS)} are known")
            for size, number in VARIANTS[name].items():
                wanted = f"{prefix}{size}" if size in OWN else size
                if found.setdefault(wanted, number) != number:
                    raise ValueError(f"{key}={name} has {wanted}={number}, and the file says {found[wanted]}")
        resolution = found.get("image_resolution")
        if resolution is not None:
            if not isinstance(resolution, (list, tuple)) or len({*resolution}) != 1:
                raise ValueError(f"image_resolution={resolution}; images are square here")
            found.setdefault("image_size", resolution[0])
        return found

    def publish(self, keys: dict[str, Any]) -> dict[str, Any]:
        """The keys of a `config.json`: lerobot's own where its variants are of these sizes, else the numbers."""
        ours = {name: self._variant(prefix) for name, prefix in PREFIXES.items()}
        plain = all(ours.values()) and all(getattr(self, key) == number for key, number in FIXED.items())
        head = {"type": "pi05", "image_resolution": [self.image_size, self.image_size]}
        if not plain or not self.discrete_state_input:
            return head | keys
        kept = {key: value for key, value in keys.items() if key not in NOT_LEROBOTS}
        return head | ours | kept | {"n_action_steps": self.chunk_size}

    def _variant(self, prefix: str) -> Optional[str]:
        for name, numbers in VARIANTS.items():
            mine = {size: getattr(self, f"{prefix}{size}" if size in OWN else size) for size in numbers}
            if mine == numbers:
                return name
        return None
