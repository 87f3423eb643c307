"""GR00T N1.7's eyes and ears: transformers' Qwen3-VL, its first layers, without the last norm and the output head.

The modules are transformers' own; the way through them is ours. All images have one size, so that a batch of them is
one attention without a loop, positions follow from token counts on the device, and prompts are filled up on their
right: causal attention then needs no mask, and no step waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import Qwen3VLConfig, Qwen3VLModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from engine.data.policy_batch import PolicyBatch
from engine.policy.groot.head import Seen, which_image_row
from engine.policy.groot.pixels import patches, pixels
from zoo.groot_n17.config import GrootN17Config

IMAGES = "zooforge_images"  # attention within each of several images of one size


def attend_within_images(
    module: nn.Module, q_1HSD: Tensor, k_1HSD: Tensor, v_1HSD: Tensor, scaling: float, images: int, **_: Any
) -> tuple[Tensor, None]:
    """transformers' interface: S is the images' patches one image after the other; [1, S, H, D]."""
    apart = [x[0].unflatten(1, (images, -1)).transpose(0, 1) for x in (q_1HSD, k_1HSD, v_1HSD)]  # [N, H, P, D]
    out = scaled_dot_product_attention(*apart, scale=scaling)
    return out.transpose(1, 2).flatten(0, 1)[None], None


ALL_ATTENTION_FUNCTIONS.register(IMAGES, attend_within_images)


def qwen_config(config: GrootN17Config) -> Qwen3VLConfig:
    """transformers' config of the layers that are there."""
    c = config
    text = {
        **{"vocab_size": c.vocab_size, "hidden_size": c.backbone_embedding_dim, "intermediate_size": c.text_mlp_dim},
        **{"num_hidden_layers": c.select_layer, "num_attention_heads": c.text_heads, "head_dim": c.text_head_dim},
        **{"num_key_value_heads": c.text_kv_heads, "rms_norm_eps": c.rms_norm_eps},
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": c.rope_theta},
            **{"mrope_interleaved": True, "mrope_section": list(c.mrope_section)},
        },
    }
    vision = {
        **{"depth": c.vision_depth, "hidden_size": c.vision_width, "intermediate_size": c.vision_mlp_dim},
        **{"num_heads": c.vision_heads, "patch_size": c.patch_size, "spatial_merge_size": c.spatial_merge_size},
        **{"temporal_patch_size": c.temporal_patch_size, "num_position_embeddings": c.num_position_embeddings},
        **{"out_hidden_size": c.backbone_embedding_dim, "deepstack_visual_indexes": list(c.deepstack_visual_indexes)},
    }
    return Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=c.image_token_id)


class Qwen3VLBackbone(nn.Module):
    """Its parameters are `model.model.*`, as Qwen3-VL with an output head has them."""

    def __init__(self, config: GrootN17Config) -> None:
        super().__init__()
        self.config = config
        self.model = nn.Module()
        inner = Qwen3VLModel._from_config(qwen_config(config), attn_implementation="sdpa")
        inner.visual.config._attn_implementation = IMAGES
        inner.language_model.norm = nn.Identity()
        self.model.model = inner
        height, width = (side // config.patch_size for side in config.image_target_size)
        self.grid = (height, width)
        self.merged = (height // config.spatial_merge_size, width // config.spatial_merge_size)
        self._places: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def forward(self, batch: PolicyBatch) -> Seen:
        """The last layer's output for the prompt with its images."""
        language, tokens = self.model.model.language_model, batch.tokens
        image_BS = tokens == self.config.image_token_id
        seen, deep = self.see(batch)
        which_BS = which_image_row(image_BS, batch.image_masks, self.config.image_tokens)
        x = language.embed_tokens(tokens)
        x = torch.where(image_BS[..., None], seen[which_BS].to(x.dtype), x)
        turn = language.rotary_emb(x, self.positions(image_BS))
        for number, layer in enumerate(language.layers):
            x = layer(x, position_embeddings=turn)
            if number < len(deep):
                x = x + deep[number][which_BS].to(x.dtype) * image_BS[..., None]
        return Seen(x, batch.token_mask, image_BS)

    def see(self, batch: PolicyBatch) -> tuple[Tensor, list[Tensor]]:
        """Every camera's image of every sample, a sample's after one another: [B V n, width], n tokens an image, and
        the same for each layer of the tower that speaks to a layer of the language model.
        """
        visual, c = self.model.model.visual, self.config
        shown = torch.stack([pixels(one, *c.view) for one in batch.images.values()], 1).flatten(0, 1)
        weight, count = visual.patch_embed.proj.weight, len(shown)
        x = patches(shown, c.patch_size, c.spatial_merge_size, c.temporal_patch_size).to(weight.dtype)
        x = linear(x, weight.flatten(1), visual.patch_embed.proj.bias)  # what its convolution computes, without one
        indices, weights, places = self._of_grid(x.device)
        x = x + (visual.pos_embed(indices) * weights[..., None]).sum(1).to(x.dtype)
        x = x.flatten(0, 1)
        turn = tuple(part.repeat(count, 1) for part in visual.rotary_pos_emb(x, places))
        ends = torch.tensor([0, len(x)])  # one piece: attention takes it apart
        deep: list[Tensor] = []
        for number, block in enumerate(visual.blocks):
            x = block(x, cu_seqlens=ends, position_embeddings=turn, images=count)
            if number in c.deepstack_visual_indexes:
                deep.append(visual.deepstack_merger_list[len(deep)](x))
        return visual.merger(x), deep

    def _of_grid(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """For an image's patches: which learned positions are mixed, with which weights, and rows and columns."""
        if device not in self._places:
            merge, grid = self.config.spatial_merge_size, torch.tensor([[1, *self.grid]])
            side = int(self.config.num_position_embeddings**0.5)
            mix = {"mode": "bilinear", "align_corners": True, "spatial_merge_size": merge}
            mixed = get_vision_interpolation_indices_and_weights(grid, side, **mix)
            places = (*mixed, get_vision_position_ids(grid, merge))
            self._places[device] = tuple(tensor.to(device) for tensor in places)
        return self._places[device]

    def positions(self, image_BS: Tensor) -> Tensor:
        """int64 [3, B, S]: time, height and width, as Qwen3-VL counts them: an image takes as much time as its longer
        side has tokens, and its tokens differ by row and column.
        """
        (height, width), counted = self.merged, image_BS.cumsum(1)
        words_BS = (~image_BS).cumsum(1) - (~image_BS).long()  # before this token
        place_BS = (counted - 1).clamp(min=0)
        images_BS = torch.where(image_BS, place_BS // (height * width), counted // (height * width))
        begin = words_BS + images_BS * max(height, width)
        inside = place_BS % (height * width) * image_BS
        return torch.stack([begin, begin + inside // width, begin + inside % width])
