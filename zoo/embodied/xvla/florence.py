"""Florence-2's encoder (arXiv 2311.06242): transformers' own class without its decoder, under lerobot's names."""

from __future__ import annotations

from torch import Tensor, cat, nn
from torch.nn.functional import interpolate, pad
from transformers import Florence2Config, Florence2Model

from zoo.xvla.config import NESTED, TEXT, VISION, XvlaConfig

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of red, green and blue
NATIVE = VISION | {"davit_dims": "embed_dim"} | {ours: native for ours, (_, _, native) in NESTED.items()}
LAYERS = ("Florence2VisionSpatialBlock", "Florence2VisionChannelBlock", "BartEncoderLayer")


def settings(config: XvlaConfig) -> Florence2Config:
    """transformers' config. The decoder is never computed; one layer of it is made and dropped."""
    text = {theirs: getattr(config, ours) for ours, theirs in TEXT.items()}
    text |= {"model_type": "bart", "decoder_layers": 1, "decoder_ffn_dim": 1, "decoder_attention_heads": 1}
    vision = {theirs: getattr(config, ours) for ours, theirs in NATIVE.items()}
    return Florence2Config(text_config=text, vision_config=vision | {"projection_dim": config.d_model})


def encoder(config: XvlaConfig) -> Florence2Model:
    """The vision tower, its projector and BART's encoder, whose word embedding is the shared one."""
    model = Florence2Model(settings(config))
    del model.language_model.decoder
    model.language_model.encoder.embed_tokens = model.language_model.shared
    return model


def image_features(model: Florence2Model, pixels_NCRR: Tensor) -> Tensor:
    """[N, 1 + patches, d_model]: the mean of an image's patches, then each of them.

    `Florence2MultiModalProjector` in as many words; here the fp32 table of times does not widen bf16 features.
    """
    projector = model.multi_modal_projector
    seen = model.vision_tower(pixels_NCRR).last_hidden_state
    x = (seen + projector.image_position_embed(seen)).flatten(2).transpose(1, 2)
    x = (x + projector.visual_temporal_embed(x[:, :1])).to(seen.dtype)
    return projector.image_proj_norm(projector.image_projection(cat([x.mean(1, keepdim=True), x], 1)))


def encoded(model: Florence2Model, first_BPW: Tensor, tokens_BS: Tensor) -> Tensor:
    """The first view's features and the instruction through BART's encoder, [B, P + S, d_model].

    Nothing is masked: the reference's encoder reads the padding of instructions, too.
    """
    said = model.language_model.shared(tokens_BS)
    return model.language_model.encoder(inputs_embeds=cat([first_BPW.to(said.dtype), said], 1)).last_hidden_state


def pixels(images: Tensor, size: int) -> Tensor:
    """Images as the tower reads them, float [B, 3, size, size], normalised by ImageNet's mean and deviation.

    uint8 [B, H, W, 3] are normalised, then resized with bars of the mean colour on the left and the top, as lerobot's
    processor and its `resize_imgs_with_padding` do; floats are such already.
    """
    if images.is_floating_point():
        return images
    x = images.permute(0, 3, 1, 2).float() / 255
    mean, std = (x.new_tensor(numbers)[:, None, None] for numbers in (MEAN, STD))
    return resize_with_pad((x - mean) / std, size)


def resize_with_pad(x_B3HW: Tensor, size: int) -> Tensor:
    """The longer side becomes `size`, the shorter one is filled up with zeros in front."""
    height, width = x_B3HW.shape[-2:]
    if (height, width) == (size, size):
        return x_B3HW
    ratio = max(height, width) / size
    new = max(1, int(height / ratio)), max(1, int(width / ratio))
    x_B3HW = interpolate(x_B3HW, new, mode="bilinear", align_corners=False)
    return pad(x_B3HW, (size - new[1], 0, size - new[0], 0))


def layers_of(*more: type[nn.Module]) -> tuple[str, ...]:
    """Names of the classes that are sharded, recomputed and compiled one by one."""
    return (*LAYERS, *(kind.__name__ for kind in more))
