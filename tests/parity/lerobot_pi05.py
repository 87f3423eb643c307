"""lerobot 0.6.1's Pi0.5 at small sizes, which it has not: its constructors' numbers are replaced while it is built."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.pi05 import modeling_pi05 as theirs
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from zoo.pi05.config import Pi05Config

HEADS = 8  # a number that lerobot's attention spells out


def settings(config: Pi05Config, cameras: tuple[str, ...], state: int, action: int) -> PI05Config:
    """Its own config class."""
    image = (3, config.image_size, config.image_size)
    return PI05Config(
        device="cpu",
        chunk_size=config.chunk_size,
        n_action_steps=config.chunk_size,
        max_action_dim=config.max_action_dim,
        max_state_dim=config.max_state_dim,
        num_inference_steps=config.num_inference_steps,
        image_resolution=image[1:],
        tokenizer_max_length=config.tokenizer_max_length,
        min_period=config.min_period,
        max_period=config.max_period,
        input_features={name: PolicyFeature(FeatureType.VISUAL, image) for name in cameras}
        | {"observation.state": PolicyFeature(FeatureType.STATE, (state,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (action,))},
    )


def policy(config: Pi05Config, cameras: tuple[str, ...] = ("top",), state: int = 5, action: int = 3) -> Any:
    """A `PI05Policy` of these sizes in fp32, weights as it draws them."""
    assert config.num_heads == HEADS
    with shrunk(config):
        return theirs.PI05Policy(settings(config, cameras, state, action)).float().eval()


def shrunk(config: Pi05Config) -> Any:
    """A context in which lerobot builds models of these sizes."""
    shared = {"depth": config.depth, "num_heads": HEADS, "num_kv_heads": config.num_kv_heads}
    shared |= {"head_dim": config.head_dim}

    def sizes(variant: str) -> Any:
        expert = variant == "gemma_300m"
        width, mlp = (config.expert_width, config.expert_mlp_dim) if expert else (config.width, config.mlp_dim)
        return theirs.GemmaConfig(width=width, mlp_dim=mlp, **shared)

    paligemma, gemma = theirs.PaliGemmaForConditionalGenerationWithPiGemma, theirs.PiGemmaForCausalLM

    def small_paligemma(config_hf: Any = None, **named: Any) -> Any:
        config_hf = config_hf or named["config"]
        config_hf.text_config.vocab_size = config_hf.vocab_size = config_hf._vocab_size = config.vocab_size
        config_hf.image_token_index = config.vocab_size - 1
        vision = config_hf.vision_config
        vision.hidden_size, vision.intermediate_size = config.vision_width, config.vision_mlp_dim
        vision.num_hidden_layers, vision.num_attention_heads = config.vision_depth, config.vision_heads
        vision.patch_size, vision.projection_dim = config.patch_size, config.width
        return paligemma(config=config_hf)

    def small_gemma(config: Any) -> Any:
        config.vocab_size = vocabulary
        return gemma(config=config)

    vocabulary = config.vocab_size
    return mock.patch.multiple(
        theirs,
        get_gemma_config=sizes,
        PaliGemmaForConditionalGenerationWithPiGemma=small_paligemma,
        PiGemmaForCausalLM=small_gemma,
    )


def sample(policy: Any, *inputs: Any, noise: torch.Tensor) -> torch.Tensor:
    """Its sampler. transformers 5.17 no longer knows an argument with which it hands its own mask through."""
    with mock.patch("lerobot.policies.pi_gemma.create_causal_mask", lambda attention_mask, **_: attention_mask):
        return policy.model.sample_actions(*inputs, noise=noise)


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int, scale: float = 1.0) -> None:
    """Values that bite: norms, gates and biases too, which lerobot begins at 0."""
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in sorted(model.named_parameters()):
        fan = tensor[0].numel() if tensor.dim() > 1 else 4
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale * fan**-0.5)


def processed(
    settings: PI05Config, statistics: dict[str, dict[str, torch.Tensor]], state: torch.Tensor, action: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[str], torch.Tensor]:
    """What its own steps make of a batch: normalised state and actions, prompts, and the actions in units again."""
    from lerobot.lerobot_types import TransitionKey
    from lerobot.policies.pi05.processor_pi05 import Pi05PrepareStateTokenizerProcessorStep
    from lerobot.processor import NormalizerProcessorStep, UnnormalizerProcessorStep
    from lerobot.processor.converters import create_transition

    features = {**settings.input_features, **settings.output_features}
    given = {"features": features, "norm_map": settings.normalization_mapping, "stats": statistics}
    transition = create_transition({"observation.state": state}, action, complementary_data={"task": TASKS})
    transition = NormalizerProcessorStep(**given)(transition)
    normalised = transition[TransitionKey.OBSERVATION]["observation.state"], transition[TransitionKey.ACTION]
    prompts = Pi05PrepareStateTokenizerProcessorStep()(transition)[TransitionKey.COMPLEMENTARY_DATA]["task"]
    back = UnnormalizerProcessorStep(**given)(create_transition(action=normalised[1]))[TransitionKey.ACTION]
    return *normalised, prompts, back


TASKS = [" pick_up the red block\nnow ", "", "stack: 'cups', then stop."]
