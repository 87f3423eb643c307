"""From a camera's image to what Qwen3-VL's vision tower reads. Computed on the model's device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import interpolate


def pixels(images: Tensor, target: Sequence[int], edge: int, share: float) -> Tensor:
    """float [B, 3, height, width] of `target`, in [-1, 1]; floats are such already.

    uint8 [B, H, W, 3] are resized to a square of side `edge`, of which the middle `share` is resized to the target,
    rounded each time, as lerobot's and NVIDIA's default preprocessing does.
    """
    if images.is_floating_point():
        return images
    x = resize(images.permute(0, 3, 1, 2).float(), (edge, edge))
    if 0 < share < 1:
        side = max(1, round(edge * share))
        first = (edge - side) // 2
        x = x[..., first : first + side, first : first + side]
    return resize(x, (target[0], target[1])) / 127.5 - 1


def resize(x_B3HW: Tensor, size: tuple[int, int]) -> Tensor:
    """Bicubic without aliasing, to whole numbers in [0, 255]."""
    if tuple(x_B3HW.shape[-2:]) == size:
        return x_B3HW
    return interpolate(x_B3HW, size, mode="bicubic", antialias=True, align_corners=False).clamp(0, 255).round()


def patches(images_N3HW: Tensor, size: int, merge: int, times: int) -> Tensor:
    """[N, P, 3 times size size]: patches in the order in which merge x merge of them become one token.

    A still image stands at each of a patch's `times`.
    """
    count, colours, height, width = images_N3HW.shape
    rows, columns = height // (merge * size), width // (merge * size)
    x = images_N3HW.reshape(count, colours, rows, merge, size, columns, merge, size)
    x = x.permute(0, 2, 5, 3, 6, 1, 4, 7)  # [N, rows, columns, merge, merge, colours, size, size]
    x = x.unsqueeze(6).expand(*x.shape[:6], times, size, size)
    return x.reshape(count, rows * columns * merge * merge, colours * times * size * size)
