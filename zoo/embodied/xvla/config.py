"""X-VLA's config keys: lerobot's for the head, and Florence-2's under flat names. Free of torch.

A published `config.json` holds Florence-2's keys as `florence_config`, in the original remote code's spelling or in
transformers'; it is written in the original spelling, which both lerobot and the original code read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from engine.schema import ModelConfig
from zoo.xvla.spaces import SPACES

TEXT = {  # ours: BART's
    **{name: name for name in ("vocab_size", "d_model", "encoder_layers", "encoder_attention_heads")},
    **{name: name for name in ("encoder_ffn_dim", "dropout", "attention_dropout", "activation_dropout")},
    "max_text_positions": "max_position_embeddings",
}
VISION = {  # ours: the original's DaViT
    **{"davit_dims": "dim_embed", "davit_depths": "depths", "davit_heads": "num_heads", "davit_groups": "num_groups"},
    **{"davit_kernels": "patch_size", "davit_strides": "patch_stride", "davit_paddings": "patch_padding"},
    **{"davit_prenorm": "patch_prenorm", "davit_window": "window_size", "drop_path_rate": "drop_path_rate"},
}
NESTED = {"max_image_positions": ("image_pos_embed", "max_pos_embeddings", "max_position_embeddings")}
NESTED |= {"max_frames": ("visual_temporal_embedding", "max_temporal_embeddings", "max_temporal_embeddings")}
NATIVE = {"embed_dim": "dim_embed"}  # transformers' name: the original's
OTHER = {"num_actions": "chunk_size", "soft_prompt_length": "len_soft_prompts"}  # the original's name: lerobot's
FIXED = {"activation_function": "gelu", "scale_embedding": False, "encoder_layerdrop": 0.0}
FLAT = {*TEXT, *VISION, *NESTED}
NOT_LEROBOTS = {*FLAT, "image_size", "model_type", "architectures", "domain_ids"}


@dataclass
class XvlaConfig(ModelConfig):
    """The keys of a model; those of lerobot's that concern its own training loop are not among them."""

    NOT_PUBLISHED: ClassVar[tuple[str, ...]] = ("initializer_range", "head_dropout")

    model_type: Optional[str] = "xvla"
    hidden_size: int = 1024  # of the head
    depth: int = 24
    num_heads: int = 16
    mlp_ratio: float = 4.0
    head_dropout: float = 0.1  # of attention and MLPs; written in the code of the reference
    num_domains: int = 30  # robots and benchmarks, each with soft prompts and action layers of its own
    domain_ids: Optional[list[int]] = None  # of each source of the data; None: by the robot's name, else 0
    len_soft_prompts: int = 32
    dim_time: int = 32
    max_len_seq: int = 512  # tokens of the head, soft prompts not counted
    use_hetero_proj: bool = False  # image and text features are projected by domain, too
    chunk_size: int = 30  # actions of a chunk; lerobot's default is 32
    action_mode: str = "ee6d"  # ee6d | agibot_ee6d | joint | auto (any actions, mean squared error)
    max_action_dim: int = 20  # of auto; the other modes have their own
    max_state_dim: int = 20  # shorter states are filled up with zeros; lerobot's default is 32
    use_proprio: bool = True
    num_denoising_steps: int = 10
    num_image_views: Optional[int] = None  # fewer cameras are filled up with empty ones; None: as many as there are
    image_size: int = 224  # images are resized to this square, with bars of the mean colour
    tokenizer_max_length: int = 64  # tokens of an instruction; longer ones are cut
    vocab_size: int = 51289  # Florence-2-large: BART's tokens and places in images
    d_model: int = 1024  # of BART's encoder, and of image features
    encoder_layers: int = 12
    encoder_attention_heads: int = 16
    encoder_ffn_dim: int = 4096
    max_text_positions: int = 4096  # of the first image and the instruction
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation_dropout: float = 0.1
    davit_dims: list[int] = field(default_factory=lambda: [256, 512, 1024, 2048])
    davit_depths: list[int] = field(default_factory=lambda: [1, 1, 9, 1])
    davit_heads: list[int] = field(default_factory=lambda: [8, 16, 32, 64])
    davit_groups: list[int] = field(default_factory=lambda: [8, 16, 32, 64])
    davit_kernels: list[int] = field(default_factory=lambda: [7, 3, 3, 3])
    davit_strides: list[int] = field(default_factory=lambda: [4, 2, 2, 2])
    davit_paddings: list[int] = field(default_factory=lambda: [3, 1, 1, 1])
    davit_prenorm: list[bool] = field(default_factory=lambda: [False, True, True, True])
    davit_window: int = 12
    drop_path_rate: float = 0.1
    max_image_positions: int = 50  # rows, and columns, of image features at most
    max_frames: int = 100  # of the table of times, of which an image has the first
    initializer_range: float = 0.02

    @property
    def horizon(self) -> int:
        """Actions of a chunk, under the name that the data knows."""
        return self.chunk_size

    @property
    def action_dim(self) -> int:
        """Numbers of an action within the model."""
        return SPACES[self.action_mode].size or self.max_action_dim

    @property
    def state_dim(self) -> int:
        """Numbers of a state within the model."""
        return self.max_state_dim if self.use_proprio else 0

    @property
    def drops(self) -> bool:
        """Whether anything is dropped in training."""
        rates = (self.head_dropout, self.dropout, self.attention_dropout, self.activation_dropout, self.drop_path_rate)
        return any(rates)

    @property
    def image_tokens(self) -> int:
        """Features of an image: its patches and their mean."""
        side = self.image_size
        for kernel, stride, padding in zip(self.davit_kernels, self.davit_strides, self.davit_paddings, strict=True):
            side = (side + 2 * padding - kernel) // stride + 1
        return side * side + 1

    def tokens(self, cameras: int) -> int:
        """Tokens of the head that have positions."""
        views = max(cameras, self.num_image_views or 0)
        return self.chunk_size + self.tokenizer_max_length + views * self.image_tokens

    @staticmethod
    def fresh_value(name: str) -> Optional[str]:
        """The domains' biases, which are rows of tables, begin at 0; the table of times is not learned.

        The first convolution's bias does not begin at 0: the bars beside an image would be vectors of zeros, at which a
        norm's gradient is more than 300 times the one that it is given.
        """
        if name.endswith("vision_tower.convs.0.conv.bias"):
            return "scattered"
        if name.endswith("pos_idx_to_embed"):
            return "sinusoids"
        return "zeros" if name.endswith(".bias.weight") else None

    @staticmethod
    def respell(published: dict[str, Any]) -> dict[str, Any]:
        """Florence-2's keys under our names, and the original's names of the head's. ValueError for another model."""
        found = {OTHER.get(key, key): value for key, value in published.items() if OTHER.get(key) not in published}
        florence = found.get("florence_config") or {}
        text, vision = dict(florence.get("text_config") or {}), dict(florence.get("vision_config") or {})
        vision |= {NATIVE[key]: value for key, value in vision.items() if key in NATIVE}
        for ours, (group, inner, native) in NESTED.items():
            vision[ours] = vision.get(native, (vision.get(group) or {}).get(inner))
        for names, part in ((TEXT, text), (VISION, vision), ({name: name for name in NESTED}, vision)):
            found |= {ours: part[theirs] for ours, theirs in names.items() if part.get(theirs) is not None}
        for key, right in FIXED.items():
            if text.get(key, right) != right:
                raise ValueError(f"florence_config.text_config.{key}={text[key]!r}; {right!r} is known")
        if (width := vision.get("projection_dim")) not in (None, text.get("d_model", width)):
            raise ValueError(f"florence_config: projection_dim={width} is not d_model={text['d_model']}")
        found["action_mode"] = str(found.get("action_mode", "ee6d")).lower()
        if found["action_mode"] not in SPACES:
            raise ValueError(f"action_mode={found['action_mode']!r}; {', '.join(SPACES)} are known")
        size = found.get("resize_imgs_with_padding")
        if size is not None:
            if len({*size}) != 1:
                raise ValueError(f"resize_imgs_with_padding={size}; images are square here")
            found.setdefault("image_size", size[0])
        return found

    def publish(self, keys: dict[str, Any]) -> dict[str, Any]:
        """The keys of a `config.json`, as lerobot writes them."""
        text = {theirs: keys[ours] for ours, theirs in TEXT.items()}
        text |= {name.replace("encoder", "decoder"): value for name, value in text.items() if name[:8] == "encoder_"}
        vision = {theirs: keys[ours] for ours, theirs in VISION.items()}
        kinds = {"max_image_positions": "learned_abs_2d", "max_frames": "COSINE"}
        vision |= {group: {"type": kinds[ours], inner: keys[ours]} for ours, (group, inner, _) in NESTED.items()}
        vision |= {"model_type": "davit", "projection_dim": self.d_model}
        vision["image_feature_source"] = ["spatial_avg_pool", "temporal_avg_pool"]
        ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "is_encoder_decoder": True}
        sizes = {"vocab_size": self.vocab_size, "projection_dim": self.d_model}
        florence = ids | sizes | {"model_type": "florence2", "text_config": text, "vision_config": vision}
        head = {"type": "xvla", "resize_imgs_with_padding": [self.image_size] * 2, "n_action_steps": self.chunk_size}
        own = {} if self.domain_ids is None else {"domain_ids": self.domain_ids}
        kept = {key: value for key, value in keys.items() if key not in NOT_LEROBOTS}
        return head | kept | {"florence_config": florence} | own
