"""SigLIP's vision tower (arXiv 2303.15343), as PaliGemma has it: all patches of the last layer, no pooling."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import gelu, interpolate, pad, scaled_dot_product_attention

EPS = 1e-6


class SiglipAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_BSW: Tensor) -> Tensor:
        q, k, v = (
            layer(x_BSW).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class SiglipMLP(nn.Module):
    def __init__(self, width: int, mlp_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, mlp_dim)
        self.fc2 = nn.Linear(mlp_dim, width)

    def forward(self, x_BSW: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x_BSW), approximate="tanh"))


class SiglipLayer(nn.Module):
    def __init__(self, width: int, mlp_dim: int, heads: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(width, EPS)
        self.self_attn = SiglipAttention(width, heads)
        self.layer_norm2 = nn.LayerNorm(width, EPS)
        self.mlp = SiglipMLP(width, mlp_dim)

    def forward(self, x_BSW: Tensor) -> Tensor:
        x_BSW = x_BSW + self.self_attn(self.layer_norm1(x_BSW))
        return x_BSW + self.mlp(self.layer_norm2(x_BSW))


class SiglipEmbeddings(nn.Module):
    def __init__(self, width: int, patch_size: int, patches: int) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, width, patch_size, patch_size)
        self.position_embedding = nn.Embedding(patches, width)

    def forward(self, pixels_B3RR: Tensor) -> Tensor:
        patches = self.patch_embedding(pixels_B3RR.to(self.patch_embedding.weight.dtype))
        return patches.flatten(2).transpose(1, 2) + self.position_embedding.weight


class SiglipEncoder(nn.Module):
    def __init__(self, layers: list[SiglipLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class SiglipTower(nn.Module):
    """Images [B, 3, R, R] in [-1, 1] to patches [B, (R / patch)^2, width]."""

    def __init__(self, width: int, mlp_dim: int, depth: int, heads: int, patch_size: int, patches: int) -> None:
        super().__init__()
        self.embeddings = SiglipEmbeddings(width, patch_size, patches)
        self.encoder = SiglipEncoder([SiglipLayer(width, mlp_dim, heads) for _ in range(depth)])
        self.post_layernorm = nn.LayerNorm(width, EPS)

    def forward(self, pixels_B3RR: Tensor) -> Tensor:
        x = self.embeddings(pixels_B3RR)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.post_layernorm(x)


def pixels(images: Tensor, size: int) -> Tensor:
    """Images as the tower reads them, float [B, 3, size, size] in [-1, 1].

    uint8 [B, H, W, 3] are resized with black bars, in floats, as openpi's and lerobot's `resize_with_pad_torch` do;
    floats are such already.
    """
    if images.is_floating_point():
        return images
    x = images.permute(0, 3, 1, 2).float() / 255
    return resize_with_pad(x, size) * 2 - 1


def resize_with_pad(x_B3HW: Tensor, size: int) -> Tensor:
    """The longer side becomes `size`; the shorter one is filled up with zeros on both ends, an odd one at the last."""
    height, width = x_B3HW.shape[-2:]
    if (height, width) == (size, size):
        return x_B3HW
    ratio = max(height, width) / size
    new = int(height / ratio), int(width / ratio)
    x_B3HW = interpolate(x_B3HW, new, mode="bilinear", align_corners=False).clamp(0, 1)
    top, left = (size - new[0]) // 2, (size - new[1]) // 2
    return pad(x_B3HW, (left, size - new[1] - left, top, size - new[0] - top))
