"""The config keys that GR00T N1.6 and N1.7 have alike: NVIDIA's, those of nested configs under names of their own.

Free of torch. Defaults are N1.7's published checkpoint's: lerobot 0.6.1's `GR00T_N1_7_DEFAULTS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from engine.policy.groot.nested import Nested, check_fixed
from engine.schema import ModelConfig

BLOCKS = {"num_layers": "layers", "num_attention_heads": "heads", "attention_head_dim": "head_dim"}
DIT = Nested(
    {theirs: f"dit_{ours}" for theirs, ours in (BLOCKS | {"dropout": "dropout"}).items()},
    {
        **{"positional_embeddings": None, "norm_type": "ada_norm", "final_dropout": True},
        **{"interleave_self_attention": True},
    },
)
VLSA = Nested(
    {theirs: f"vlsa_{ours}" for theirs, ours in (BLOCKS | {"dropout": "dropout"}).items()},
    {"positional_embeddings": None, "final_dropout": True},
)
ATTENTION = {  # of a Qwen3 decoder
    **{"vocab_size": "vocab_size", "intermediate_size": "text_mlp_dim", "num_attention_heads": "text_heads"},
    **{"num_key_value_heads": "text_kv_heads", "head_dim": "text_head_dim", "rope_theta": "rope_theta"},
    "rms_norm_eps": "rms_norm_eps",
}
TOWER = {"depth": "vision_depth", "hidden_size": "vision_width", "intermediate_size": "vision_mlp_dim"}
FIXED = {
    **{"use_alternate_vl_dit": True, "use_vlln": True, "add_pos_embed": True, "use_relative_action": False},
    **{"state_history_length": 1, "exclude_state": False, "use_mean_std": False, "reproject_vision": False},
}
LEROBOTS = {  # lerobot's names of robots, in its configs
    **{"simpler_env_google": 0, "simpler_env_widowx": 1, "libero_sim": 2, "new_embodiment": 10},
    **{"oxe_droid_relative_eef_relative_joint": 24, "real_g1_relative_eef_relative_joints": 25},
    **{"unitree_g1_full_body_with_waist_height_nav_cmd": 25, "real_r1_pro_sharpa_relative_eef": 26},
    **{"real_r1_pro_sharpa_relative_eef_human": 26, "real_r1_pro_sharpa_relative_eef_maxinsights": 26},
    **{"real_r1_pro_sharpa_relative_eef_mecka": 26, "xdof_relative_eef_relative_joint": 27},
    **{"xdof_relative_eef_relative_joint_subtask": 27},
}
HEAD = {"diffusion_model_cfg": DIT, "vl_self_attention_cfg": VLSA}
OURS = "backbone_sizes"  # the published key that says a backbone's sizes, where they are not the published ones


@dataclass
class HeadConfig(ModelConfig):
    """The keys that N1.6 and N1.7 have alike; those that concern a training loop are not among them."""

    NOT_PUBLISHED: ClassVar[tuple[str, ...]] = ("initializer_range",)
    FREE: ClassVar[tuple[str, ...]] = (  # change no tensor: a run may set them beside any weights
        *("embodiments", "num_inference_timesteps", "state_dropout_prob", "formalize_language"),
        *("tune_llm", "tune_visual", "tune_top_llm_layers", "tune_projector", "tune_diffusion_model", "tune_vlln"),
    )

    select_layer: int = 16  # layers of the language model
    backbone_embedding_dim: int = 2048  # its width
    max_state_dim: int = 132  # shorter states and actions are filled up with zeros
    max_action_dim: int = 132
    action_horizon: int = 40  # actions of a chunk; shorter ones are filled up with steps that do not count
    hidden_size: int = 1024  # of the layers that each robot has of its own
    input_embedding_dim: int = 1536  # the diffusion transformer's width
    max_seq_len: int = 1024  # learned positions
    dit_layers: int = 32  # diffusion_model_cfg
    dit_heads: int = 32
    dit_head_dim: int = 48
    dit_dropout: float = 0.2
    attend_text_every_n_blocks: int = 2  # of the blocks that look at text or images, every n-th looks at text
    vlsa_layers: int = 4  # vl_self_attention_cfg
    vlsa_heads: int = 32
    vlsa_head_dim: int = 64
    vlsa_dropout: float = 0.2
    num_inference_timesteps: int = 4  # Euler steps from noise to actions
    noise_beta_alpha: float = 1.5  # training times are noise_s (1 - Beta(alpha, beta))
    noise_beta_beta: float = 1.0
    noise_s: float = 0.999
    num_timestep_buckets: int = 1000
    state_dropout_prob: float = 0.2
    max_num_embodiments: int = 32
    embodiments: list[int] = field(default_factory=lambda: [10])  # the robot's number; of a mixture, one a source
    tune_llm: bool = False  # what learns; the rest stands still
    tune_visual: bool = False
    tune_top_llm_layers: int = 0  # that many last layers of the language model learn all the same
    tune_projector: bool = True
    tune_diffusion_model: bool = True
    tune_vlln: bool = True
    formalize_language: bool = True  # instructions in small letters, without punctuation
    use_percentiles: bool = True  # normalise by the 1st and 99th percentile; false: by the smallest and largest number
    vocab_size: int = 151936
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    BACKBONE: ClassVar[str] = ""  # what `model_name` says
    PARTS: ClassVar[dict[str, Nested]] = {}  # of OURS; "" for keys that it holds itself
    SAME: ClassVar[dict[str, Any]] = FIXED
    ZERO_STATE: ClassVar[bool] = False  # dropped states are zeros before the head drops some again

    @property
    def horizon(self) -> int:
        """Actions of a chunk, under the name that the data knows."""
        return self.action_horizon

    @staticmethod
    def fresh_value(name: str) -> Optional[str]:
        """First values of another kind than usual: biases of the layers that each robot has of its own."""
        return "zeros" if name.endswith(".b") else None

    @classmethod
    def respell(cls, published: dict[str, Any]) -> dict[str, Any]:
        """Nested configs as keys. ValueError for what no such model has.

        A policy that lerobot trained (`type: groot`) says no sizes: they are the published model's.
        """
        nothing = {key for key, value in published.items() if value is None and key != "image_crop_size"}
        found = {key: value for key, value in published.items() if key not in nothing}
        if found.get("type") == "groot":
            found.setdefault("embodiments", [LEROBOTS.get(found.get("embodiment_tag", ""), 0)])
        check_fixed(found, cls.SAME)
        backbone = found.get(OURS) or {}
        if not backbone and found.get("model_name", cls.BACKBONE) != cls.BACKBONE:
            right = f"{cls.BACKBONE!r}, or its sizes as {OURS}, would be right"
            raise ValueError(f"model_name={found['model_name']!r}; {right}")
        for key, nested in HEAD.items():
            found |= nested.read(found.get(key) or {}, key)
        if "vl_self_attention_cfg" in found and not found["vl_self_attention_cfg"]:
            found["vlsa_layers"] = 0
        for key, nested in cls.PARTS.items():
            found |= nested.read(backbone.get(key, {}) if key else backbone, f"{OURS}.{key}")
        return found

    def publish(self, keys: dict[str, Any]) -> dict[str, Any]:
        """The keys of a `config.json`, nested as NVIDIA's."""
        sizes = {key for nested in self.PARTS.values() for key in nested.keys.values()}
        inner = sizes | {key for nested in HEAD.values() for key in nested.keys.values()}
        found = self.SAME | {"model_name": self.BACKBONE} | {k: v for k, v in keys.items() if k not in inner}
        found["diffusion_model_cfg"] = DIT.write(self) | {"output_dim": self.hidden_size}
        found["vl_self_attention_cfg"] = VLSA.write(self) if self.vlsa_layers else {}
        usual = type(self)(name="")
        if any(getattr(self, key) != getattr(usual, key) for key in sizes):
            parts = {key: nested.write(self) for key, nested in self.PARTS.items() if key}
            found[OURS] = parts | (self.PARTS[""].write(self) if "" in self.PARTS else {})
        return found
