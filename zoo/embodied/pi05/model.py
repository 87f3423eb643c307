"""Pi0.5: PaliGemma reads images and a prompt, a Gemma expert turns noise into actions. Names are lerobot's.

Source: arXiv 2504.16054 and openpi's `pi0.py`; x_t = t noise + (1 - t) actions, the expert gives noise - actions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from engine.data.policy_batch import PolicyBatch
from zoo.pi05.config import Pi05Config
from zoo.pi05.gemma import AdaptiveRMSNorm, ExpertLayer, GemmaLayer, RMSNorm, angles
from zoo.pi05.vision import SiglipTower, pixels


class Tree(nn.Module):
    """Modules under names, and nothing else."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Prefix:
    """What the actions are made from: keys and values of every layer, and which of them count."""

    def __init__(self, keys_values: list[tuple[Tensor, Tensor]], mask_BP: Tensor) -> None:
        self.keys_values, self.mask = keys_values, mask_BP
        self.length = mask_BP.sum(1, keepdim=True)  # [B, 1]: positions go on from here


class Pi05(nn.Module):
    """The model; `forward` is what a strategy wraps, so that everything is computed within it."""

    def __init__(self, config: Pi05Config) -> None:
        super().__init__()
        self.config = c = config
        tower = (c.vision_width, c.vision_mlp_dim, c.vision_depth, c.vision_heads, c.patch_size, c.patches)
        heads = (c.num_heads, c.num_kv_heads, c.head_dim)
        language = Tree(
            embed_tokens=nn.Embedding(c.vocab_size, c.width),
            layers=nn.ModuleList(GemmaLayer(c.width, c.mlp_dim, *heads) for _ in range(c.depth)),
            norm=RMSNorm(c.width),
        )
        paligemma = Tree(
            vision_tower=SiglipTower(*tower),
            multi_modal_projector=Tree(linear=nn.Linear(c.vision_width, c.width)),
            language_model=language,
        )
        expert = Tree(
            layers=nn.ModuleList(ExpertLayer(c.expert_width, c.expert_mlp_dim, *heads) for _ in range(c.depth)),
            norm=AdaptiveRMSNorm(c.expert_width, c.expert_width),
        )
        self.paligemma_with_expert = Tree(paligemma=Tree(model=paligemma), gemma_expert=Tree(model=expert))
        self.action_in_proj = nn.Linear(c.max_action_dim, c.expert_width)
        self.action_out_proj = nn.Linear(c.expert_width, c.max_action_dim)
        self.time_mlp_in = nn.Linear(c.expert_width, c.expert_width)
        self.time_mlp_out = nn.Linear(c.expert_width, c.expert_width)

    def forward(self, batch: PolicyBatch, sample: bool = False) -> Tensor:
        """fp32 [B, T, max_action_dim]: the velocity at `batch.time`, or with `sample` the actions.

        `batch.noise` is [B, T, max_action_dim]; actions [B, T, A] may have fewer numbers, which zeros complete.
        """
        noise, prefix = batch.noise, self.prefix(batch)
        if sample:
            return self._sampled(prefix, noise)
        actions = pad(batch.actions, (0, noise.shape[-1] - batch.actions.shape[-1]))
        time = batch.time[:, None, None]
        return self.velocity(prefix, time * noise + (1 - time) * actions, batch.time)

    def _sampled(self, prefix: Prefix, x_BTA: Tensor) -> Tensor:
        """Euler's method from the noise at time 1 to the actions at time 0."""
        steps = self.config.num_inference_steps
        for step in range(steps):
            time = torch.full(x_BTA.shape[:1], 1.0 - step / steps, device=x_BTA.device)
            x_BTA = x_BTA - self.velocity(prefix, x_BTA, time) / steps
        return x_BTA

    def prefix(self, batch: PolicyBatch) -> Prefix:
        """Images in the order of the cameras, then the prompt, through the language model."""
        model = self.paligemma_with_expert.paligemma.model
        language = model.language_model
        seen = torch.cat([pixels(images, self.config.image_size) for images in batch.images.values()])
        seen = model.multi_modal_projector.linear(model.vision_tower(seen))  # all cameras at once
        seen = torch.cat(seen.chunk(len(batch.images)), 1)
        said = language.embed_tokens(batch.tokens) * math.sqrt(self.config.width)
        masks = [mask[:, None].expand(-1, self.config.patches) for mask in batch.image_masks.values()]
        mask_BP = torch.cat([*masks, batch.token_mask], 1)
        x = torch.cat([seen.to(said.dtype), said], 1)
        # What pads may read anything that counts: nobody reads it, and a row that reads nothing has no softmax.
        turn, mask = angles(mask_BP.cumsum(1) - 1, self.config.head_dim), mask_BP[:, None, None]
        keys_values = []
        for number, layer in enumerate(language.layers):
            x, k, v = layer(x, turn, mask, last=number == len(language.layers) - 1)
            keys_values.append((k, v))
        return Prefix(keys_values, mask_BP)

    def velocity(self, prefix: Prefix, x_BTA: Tensor, time_B: Tensor) -> Tensor:
        """The expert's answer for partly noised actions, fp32 [B, T, max_action_dim]."""
        expert, dtype = self.paligemma_with_expert.gemma_expert.model, self.action_in_proj.weight.dtype
        length = x_BTA.shape[1]
        places = prefix.length + torch.arange(length, device=x_BTA.device)
        turn = angles(places, self.config.head_dim)
        mask = torch.cat([prefix.mask, prefix.mask.new_ones(len(x_BTA), length)], 1)[:, None, None]
        told = time_embedding(time_B, self.config.expert_width, self.config.min_period, self.config.max_period)
        cond = silu(self.time_mlp_out(silu(self.time_mlp_in(told.to(dtype)))))
        x = self.action_in_proj(x_BTA.to(dtype))
        for layer, (k, v) in zip(expert.layers, prefix.keys_values, strict=True):
            x = layer(x, cond, turn, k, v, mask)
        return self.action_out_proj(expert.norm(x, cond)[0]).float()


class Pi05Policy(nn.Module):
    """The model under the prefix that lerobot gives it."""

    _no_split_modules = ("SiglipLayer", "GemmaLayer", "ExpertLayer")

    def __init__(self, config: Pi05Config) -> None:
        super().__init__()
        self.model = Pi05(config)

    def forward(self, batch: PolicyBatch, sample: bool = False) -> Tensor:
        return self.model(batch, sample)


def time_embedding(time_B: Tensor, width: int, shortest: float, longest: float) -> Tensor:
    """Sines, then cosines, of a time in [0, 1] at periods spaced geometrically, fp32 [B, width]; angles in fp64."""
    places = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time_B.device)
    periods = shortest * (longest / shortest) ** places
    phases = time_B.double()[:, None] * (2 * math.pi / periods)
    return torch.cat([phases.sin(), phases.cos()], 1).float()
