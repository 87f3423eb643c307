"""GR00T N1.6's eyes and ears: Eagle, of transformers' SigLIP2 and Qwen3 with a pixel shuffle and a connector between.

Prompts are filled up on their right, so that causal attention needs no mask (see the backbone of N1.7).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3Model, Siglip2VisionConfig, Siglip2VisionModel

from engine.data.policy_batch import PolicyBatch
from engine.policy.groot.head import Seen, which_image_row
from engine.policy.groot.pixels import pixels
from zoo.groot_n16.config import GrootN16Config


def text_config(config: GrootN16Config) -> Qwen3Config:
    """transformers' config of the layers that are there."""
    c = config
    return Qwen3Config(
        **{"vocab_size": c.vocab_size, "hidden_size": c.backbone_embedding_dim, "intermediate_size": c.text_mlp_dim},
        **{"num_hidden_layers": c.select_layer, "num_attention_heads": c.text_heads, "head_dim": c.text_head_dim},
        **{"num_key_value_heads": c.text_kv_heads, "rms_norm_eps": c.rms_norm_eps, "use_sliding_window": False},
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )


def vision_config(config: GrootN16Config) -> Siglip2VisionConfig:
    """transformers' config of the tower, without a pooling head."""
    c = config
    made = Siglip2VisionConfig(
        **{"hidden_size": c.vision_width, "intermediate_size": c.vision_mlp_dim, "num_hidden_layers": c.vision_depth},
        **{"num_attention_heads": c.vision_heads, "patch_size": c.patch_size},
        num_patches=(c.image_size // c.patch_size) ** 2,
    )
    made.vision_use_head = False
    return made


class Under(nn.Module):
    """A module under a name, and nothing else."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class EagleBackbone(nn.Module):
    """Its parameters are `model.vision_model`, `model.mlp1` and `model.language_model`."""

    def __init__(self, config: GrootN16Config) -> None:
        super().__init__()
        self.config = config
        merged, width = 4 * config.vision_width, config.backbone_embedding_dim
        self.model = Under(
            vision_model=Under(
                vision_model=Siglip2VisionModel._from_config(vision_config(config), attn_implementation="sdpa")
            ),
            mlp1=nn.Sequential(nn.LayerNorm(merged), nn.Linear(merged, width), nn.GELU(), nn.Linear(width, width)),
            language_model=Under(model=Qwen3Model._from_config(text_config(config), attn_implementation="sdpa")),
        )

    def forward(self, batch: PolicyBatch) -> Seen:
        """The language model's output, after its last norm, for the prompt with its images."""
        language = self.model.language_model.model
        image_BS = batch.tokens == self.config.image_token_id
        seen = self.see(batch)
        which_BS = which_image_row(image_BS, batch.image_masks, self.config.image_tokens)
        x = language.embed_tokens(batch.tokens)
        x = torch.where(image_BS[..., None], seen[which_BS].to(x.dtype), x)
        turn = language.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
        for layer in language.layers:
            x = layer(x, position_embeddings=turn)
        return Seen(language.norm(x), batch.token_mask, image_BS)

    def see(self, batch: PolicyBatch) -> Tensor:
        """Every camera's image of every sample, a sample's after one another: [B V n, width], n tokens an image."""
        tower = self.model.vision_model.vision_model
        shown = torch.stack([pixels(one, *self.config.view) for one in batch.images.values()], 1).flatten(0, 1)
        embed = tower.embeddings
        x = patch_rows(shown, self.config.patch_size).to(embed.patch_embedding.weight.dtype)
        x = embed.patch_embedding(x) + embed.position_embedding.weight
        for layer in tower.encoder.layers:
            x = layer(x, attention_mask=None)
        return self.model.mlp1(pixel_shuffle(tower.post_layernorm(x))).flatten(0, 1)


def patch_rows(images_N3HW: Tensor, size: int) -> Tensor:
    """[N, P, size size 3]: patches row by row, colours last, as SigLIP2's processor makes them."""
    count, colours, height, width = images_N3HW.shape
    x = images_N3HW.reshape(count, colours, height // size, size, width // size, size)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(count, -1, size * size * colours)


def pixel_shuffle(x_NPC: Tensor) -> Tensor:
    """[N, P / 4, 4 C]: each 2 x 2 of a square of patches as one token; InternVL's second version (arXiv 2404.16821)."""
    side = round(x_NPC.shape[1] ** 0.5)
    x = x_NPC.unflatten(1, (side // 2, 2, side // 2, 2))  # [N, rows, row in two, columns, column in two, C]
    return x.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)
