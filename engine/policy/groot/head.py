"""GR00T's action head: from what was seen and said, and a state, noise becomes a chunk of actions by flow matching.

x_t = (1 - t) noise + t actions, the head gives actions - noise; t in [0, 1) is told as one of 1000 buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.data.policy_batch import PolicyBatch
from engine.policy.groot.category import ActionEncoder, CategorySpecificMLP, Robots
from engine.policy.groot.dit import AlternateVLDiT, VLSelfAttention


class Seen:
    """The backbone's answer, [B, S, V], and which of it is text and which is image (bool [B, S])."""

    def __init__(self, features_BSV: Tensor, counts_BS: Tensor, image_BS: Tensor) -> None:
        self.features, self.counts = features_BSV, counts_BS
        self.text, self.image = counts_BS & ~image_BS, counts_BS & image_BS


def which_image_row(image_BS: Tensor, there: dict[str, Tensor], tokens: int) -> Tensor:
    """int64 [B, S]: of images' tokens [B V tokens, ...], a sample's V cameras after one another, the row that stands at
    each image token. `there` says which cameras a sample has, bool [B] each: its prompt leaves the others out.
    """
    there_BV = torch.stack(list(there.values()), 1)
    cameras = there_BV.shape[1]
    place_BS = (image_BS.cumsum(1) - 1).clamp(min=0)
    order_BV = (~there_BV).to(torch.uint8).argsort(dim=1, stable=True)
    camera_BS = order_BV.gather(1, (place_BS // tokens).clamp(max=cameras - 1))
    rows_B1 = torch.arange(len(image_BS), device=image_BS.device)[:, None]
    return (rows_B1 * cameras + camera_BS) * tokens + place_BS % tokens


class ActionHead(nn.Module):
    """For N1.7 and, with `mask_token` and without VL self-attention, N1.6; `config` has the keys that both have."""

    def __init__(self, config: Any, mask_token: bool = False) -> None:
        super().__init__()
        self.config = c = config
        robots, seen, width = c.max_num_embodiments, c.backbone_embedding_dim, c.input_embedding_dim
        dit = (c.dit_heads, c.dit_head_dim, c.dit_layers, c.dit_dropout)
        self.model = AlternateVLDiT(*dit, seen, c.hidden_size, c.attend_text_every_n_blocks)
        self.state_encoder = CategorySpecificMLP(robots, c.max_state_dim, c.hidden_size, width)
        self.action_encoder = ActionEncoder(robots, c.max_action_dim, width)
        self.action_decoder = CategorySpecificMLP(robots, c.hidden_size, c.hidden_size, c.max_action_dim)
        self.vlln = nn.LayerNorm(seen)
        self.vl_self_attention = None
        if c.vlsa_layers:
            self.vl_self_attention = VLSelfAttention(seen, c.vlsa_heads, c.vlsa_layers, c.vlsa_dropout)
        self.position_embedding = nn.Embedding(c.max_seq_len, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width)) if mask_token else None

    def forward(self, seen: Seen, batch: PolicyBatch, sample: bool) -> Tensor:
        """fp32 [B, T, max_action_dim]: the velocity at `batch.time`, or with `sample` the actions.

        `batch.noise` is [B, T, max_action_dim]; actions [B, T, A] may have fewer numbers, which zeros complete.
        """
        noise = batch.noise
        robots = Robots(self._robots(batch), noise.device)
        seen.features = self.vlln(seen.features)
        if self.vl_self_attention is not None:
            seen.features = self.vl_self_attention(seen.features, seen.counts)
        state = self._state(batch, robots)
        if sample:
            return self._sampled(seen, state, noise, robots)
        actions = pad(batch.actions, (0, noise.shape[-1] - batch.actions.shape[-1]))
        time = batch.time[:, None, None]
        bucket = (batch.time * self.config.num_timestep_buckets).long()
        return self.velocity(seen, state, (1 - time) * noise + time * actions, bucket, robots)

    def _robots(self, batch: PolicyBatch) -> Sequence[int]:
        return batch.embodiments or [self.config.embodiments[0]] * len(batch.state)

    def _state(self, batch: PolicyBatch, robots: Robots) -> Tensor:
        """[B, 1, width]. A state that is dropped is nothing, or N1.6's learned token for it."""
        state = batch.state.to(self.state_encoder.layer1.W.dtype)[:, None]
        encoded = self.state_encoder(pad(state, (0, self.config.max_state_dim - state.shape[-1])), robots)
        if batch.state_dropped is None:
            return encoded
        nothing = torch.zeros_like(encoded) if self.mask_token is None else self.mask_token.to(encoded.dtype)
        return torch.where(batch.state_dropped[:, None, None], nothing, encoded)

    def _sampled(self, seen: Seen, state: Tensor, x_BTA: Tensor, robots: Robots) -> Tensor:
        """Euler's method from the noise at time 0 to the actions at time 1."""
        steps, buckets = self.config.num_inference_timesteps, self.config.num_timestep_buckets
        for step in range(steps):
            bucket = torch.full(x_BTA.shape[:1], int(step / steps * buckets), device=x_BTA.device)
            x_BTA = x_BTA + self.velocity(seen, state, x_BTA, bucket, robots) / steps
        return x_BTA

    def velocity(self, seen: Seen, state: Tensor, x_BTA: Tensor, bucket_B: Tensor, robots: Robots) -> Tensor:
        """The head's answer for partly noised actions, fp32 [B, T, max_action_dim]."""
        length = x_BTA.shape[1]
        x = self.action_encoder(x_BTA.to(self.action_encoder.W1.W.dtype), bucket_B, robots)
        x = torch.cat([state, x + self.position_embedding.weight[:length]], 1)
        x = self.model(x, bucket_B, seen.features, seen.text, seen.image)
        return self.action_decoder(x[:, -length:], robots).float()
