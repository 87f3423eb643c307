"""GR00T against lerobot 0.6.1: the same weights, images, prompts, noise and times give the same numbers in fp32.

lerobot has N1.7. Of N1.6 it has the head, without VL self-attention; the backbone is compared with transformers' parts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear
from zoo.groot_n16.config import GrootN16Config
from zoo.groot_n17.config import GrootN17Config
from zoo.groot_n17.model import GrootN17
from zoo.groot_n17.objective import OBJECTIVE
from zoo.groot_n17.weights import NORM, OUTPUT, weight_map

from engine.backends.native.model import fill_buffers
from engine.data.policy_batch import PolicyBatch
from engine.policy.groot.pixels import pixels
from tests.parity import lerobot_groot as lerobot

BASE: dict[str, Any] = {
    **{"name": "parity", "vocab_size": 101, "image_token_id": 97, "patch_size": 4, "dit_dropout": 0.3},
    **{"vlsa_dropout": 0.3, "max_state_dim": 9, "max_action_dim": 8, "max_num_embodiments": 5, "max_seq_len": 19},
    **{"tune_llm": True, "tune_visual": True, "num_position_embeddings": 25, "embodiments": [4]},
}
CASES = {
    "two_cameras": GrootN17Config(
        **BASE,
        **{"select_layer": 3, "backbone_embedding_dim": 40, "text_mlp_dim": 56, "text_heads": 6, "text_kv_heads": 2},
        **{"text_head_dim": 14, "mrope_section": [3, 2, 2], "vision_width": 24, "vision_mlp_dim": 30},
        **{"vision_depth": 3, "vision_heads": 2, "deepstack_visual_indexes": [0, 2], "image_target_size": [24, 16]},
        **{"image_crop_size": [21, 21], "dit_layers": 6, "dit_heads": 3, "dit_head_dim": 10},
        **{"input_embedding_dim": 30, "hidden_size": 26, "vlsa_layers": 2, "vlsa_heads": 5, "vlsa_head_dim": 8},
        **{"action_horizon": 7, "num_inference_timesteps": 4},
    ),
    "one_action": GrootN17Config(
        **BASE,
        **{"select_layer": 1, "backbone_embedding_dim": 24, "text_mlp_dim": 20, "text_heads": 2, "text_kv_heads": 2},
        **{"text_head_dim": 12, "mrope_section": [2, 2, 2], "vision_width": 16, "vision_mlp_dim": 22},
        **{"vision_depth": 1, "vision_heads": 2, "deepstack_visual_indexes": [], "image_target_size": [8, 8]},
        **{
            "image_crop_size": None,
            "dit_layers": 3,
            "dit_heads": 1,
            "dit_head_dim": 18,
            "attend_text_every_n_blocks": 1,
        },
        **{"input_embedding_dim": 18, "hidden_size": 10, "vlsa_layers": 1, "vlsa_heads": 2, "vlsa_head_dim": 12},
        **{"action_horizon": 1, "num_inference_timesteps": 3},
    ),
}
CAMERAS = ("top", "wrist")
STATE, ACTION, ROWS = 5, 3, 3


def drawn_values(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    holder = torch.nn.Module()
    for name, shape in shapes.items():
        holder.register_parameter(name.replace(".", "/"), torch.nn.Parameter(torch.empty(shape)))
    lerobot.randomise(holder, seed=7)
    return {name.replace("/", "."): parameter.detach() for name, parameter in holder.named_parameters()}


def ours_of(values: dict[str, Tensor], config: Any, of: Any = GrootN17) -> Any:
    with torch.device("meta"):
        ours = of(config)
    ours.to_empty(device="cpu")
    fill_buffers_again(ours)
    ours.load_state_dict({name: values[name] for name in ours.state_dict()})
    return ours.eval()


def fill_buffers_again(module: torch.nn.Module) -> None:
    """Buffers that `to_empty` gave memory: their values are those that no checkpoint holds."""
    for part in module.modules():
        part._buffers = {name: buffer.to("meta") for name, buffer in part._buffers.items()}
    fill_buffers(module, torch.device("cpu"))


def theirs_and_ours(config: GrootN17Config) -> tuple[Any, GrootN17]:
    theirs = lerobot.model(config)
    lerobot.randomise(theirs, seed=3)
    values = theirs.state_dict()
    assert {name: tuple(t.shape) for name, t in values.items() if name != OUTPUT} == weight_map(config).published
    return theirs, ours_of(values, config)


def observed(config: Any, ragged: bool) -> PolicyBatch:
    """Three robots, odd images of other sizes; `ragged`: prompts of unlike lengths, one without its second camera."""
    generator = torch.Generator().manual_seed(1)
    sizes = {CAMERAS[0]: (33, 20), CAMERAS[1]: (24, 24)}
    images = {n: torch.randint(0, 256, (ROWS, *size, 3), generator=generator).byte() for n, size in sizes.items()}
    there = torch.ones(ROWS, 2, dtype=torch.bool)
    there[1, 0] = not ragged
    rows = []
    for row, words in enumerate((4, 7, 1) if ragged else (4, 4, 4)):
        said = torch.randint(0, 90, (words + 4,), generator=generator)
        image = torch.tensor([91, *[config.image_token_id] * config.image_tokens, 92])
        rows.append(torch.cat([said[:2], *[image] * int(there[row].sum()), said[2:]]))
    lengths = torch.tensor([len(row) for row in rows])
    prompts = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    shape = (ROWS, config.action_horizon)
    return PolicyBatch(
        images=images,
        image_masks={name: there[:, n] for n, name in enumerate(CAMERAS)},
        state=torch.randn((ROWS, STATE), generator=generator),
        actions=torch.randn((*shape, ACTION), generator=generator),
        action_pad=torch.zeros(shape, dtype=torch.bool),
        sample_ids=list(range(ROWS)),
        embodiments=[4, 0, 4],
        tokens=prompts,
        token_mask=torch.arange(prompts.shape[1]) < lengths[:, None],
        noise=torch.randn((*shape, config.max_action_dim), generator=generator),
        time=torch.tensor([0.0305, 0.5, 0.9985]),
    )


def seen(config: Any, batch: PolicyBatch) -> dict[str, Tensor]:
    return {n: pixels(one, *config.view) for n, one in batch.images.items()}


def close(ours: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(ours, expected, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_loss_velocity_gradients_and_samples_equal_lerobots(case: str, ragged: bool) -> None:
    """Where prompts are of unlike lengths lerobot gets each row alone: its VL self-attention reads what fills up."""
    config = CASES[case]
    theirs, ours = theirs_and_ours(config)
    batch = observed(config, ragged)
    groups = [[row] for row in range(ROWS)] if ragged else [list(range(ROWS))]
    shown, losses, velocities, sampled = seen(config, batch), [], [], []
    for rows in groups:
        inputs = lerobot.inputs(config, batch, shown, rows)
        loss, velocity = lerobot.loss(theirs, inputs, batch, rows)
        (loss * len(rows) / ROWS).backward()
        losses.append(loss.item() * len(rows) / ROWS)
        velocities.append(velocity)
        sampled.append(lerobot.sample(theirs, inputs, batch, rows))

    kept: list[Tensor] = []
    total = OBJECTIVE.loss_sum(ours, batch, kept.append)
    (total / ROWS).backward()
    close(total / ROWS, torch.tensor(sum(losses)))
    close(kept[0], torch.cat(velocities))
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        if grads[name] is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            assert (parameter.grad - grads[name]).norm() <= 1e-4 * grads[name].norm() + 1e-6, name
    assert grads[NORM] is None, "nothing reads the last norm"
    with torch.no_grad():
        close(OBJECTIVE.outputs(ours, batch)["actions"], torch.cat(sampled), atol=1e-4)


def test_training_with_dropout_dropped_states_and_padded_steps_equals_lerobots() -> None:
    """The same draws of torch's generator: dropout stands in the same places, in the same order."""
    config = CASES["two_cameras"]
    theirs, ours = theirs_and_ours(config)
    batch = observed(config, ragged=False)
    batch.action_pad[:, 5:] = True
    batch.actions = batch.actions * ~batch.action_pad[..., None]  # as both processors do
    batch.state_dropped = torch.tensor([False, True, False])
    theirs.train(), ours.train()
    rows = list(range(ROWS))
    inputs = lerobot.inputs(config, batch, seen(config, batch), rows)
    torch.manual_seed(5)
    expected, velocity = lerobot.loss(theirs, inputs, batch, rows)
    torch.manual_seed(5)
    kept: list[Tensor] = []
    close(OBJECTIVE.loss_sum(ours, batch, kept.append) / ROWS, expected)
    close(kept[0], velocity)


N16 = GrootN16Config(
    **{"name": "parity", "vocab_size": 101, "image_token_id": 97, "patch_size": 3, "image_size": 12, "tune_llm": True},
    **{"tune_visual": True, "shortest_image_edge": 15, "select_layer": 2, "backbone_embedding_dim": 36},
    **{"text_mlp_dim": 44, "text_heads": 6, "text_kv_heads": 2, "text_head_dim": 10, "vision_width": 20},
    **{"vision_mlp_dim": 26, "vision_depth": 2, "vision_heads": 4, "dit_layers": 5, "dit_heads": 2},
    **{"dit_head_dim": 12, "input_embedding_dim": 24, "hidden_size": 14, "action_horizon": 6, "max_state_dim": 9},
    **{"max_action_dim": 8, "max_num_embodiments": 5, "max_seq_len": 11},
)


def eagle(config: GrootN16Config, batch: PolicyBatch, values: dict[str, Tensor], row: int) -> tuple[Tensor, Tensor]:
    """A row's features and tokens, by transformers' own ways through SigLIP2, InternVL's shuffle and Qwen3."""
    from transformers import InternVLModel, Qwen3Model, Siglip2VisionModel
    from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches
    from zoo.groot_n16.backbone import text_config, vision_config
    from zoo.groot_n16.weights import CONNECTOR, LANGUAGE, VISION

    def loaded(module: torch.nn.Module, prefix: str) -> torch.nn.Module:
        module.load_state_dict({n.removeprefix(prefix): t for n, t in values.items() if n.startswith(prefix)})
        return module.eval()

    tower = loaded(Siglip2VisionModel(vision_config(config)), VISION)
    language = loaded(Qwen3Model(text_config(config)), LANGUAGE)
    shown = [one[row] for name, one in seen(config, batch).items() if batch.image_masks[name][row]]
    side = config.image_size // config.patch_size
    rows = [convert_image_to_patches(one, config.patch_size) for one in shown]
    shapes = torch.tensor([[side, side]] * len(rows))
    x = tower(torch.stack(rows), torch.ones(len(rows), side * side), shapes).last_hidden_state
    x = InternVLModel.pixel_shuffle(None, x.unflatten(1, (side, side)), 0.5).flatten(1, 2)
    x = layer_norm(x, x.shape[-1:], values[f"{CONNECTOR}0.weight"], values[f"{CONNECTOR}0.bias"])
    x = gelu(linear(x, values[f"{CONNECTOR}1.weight"], values[f"{CONNECTOR}1.bias"]))
    x = linear(x, values[f"{CONNECTOR}3.weight"], values[f"{CONNECTOR}3.bias"])
    tokens = batch.tokens[row][batch.token_mask[row]][None]
    embedded = language.embed_tokens(tokens)
    embedded[tokens == config.image_token_id] = x.flatten(0, 1)
    return language(inputs_embeds=embedded).last_hidden_state, tokens


def test_n16s_backbone_equals_transformers_parts_and_its_head_lerobots() -> None:
    """Each row alone, prompts of unlike lengths, a dropped state, three robots."""
    from lerobot.policies.groot.groot_n1_7 import GR00TN17ActionHead, GR00TN17Config
    from transformers.feature_extraction_utils import BatchFeature
    from zoo.groot_n16.model import GrootN16
    from zoo.groot_n16.weights import weight_map as tensors

    config = N16
    ours = ours_of(drawn_values(tensors(config).published), config, GrootN16)
    values = dict(ours.state_dict())
    batch = observed(config, ragged=True)
    batch.state_dropped = torch.tensor([False, True, False])
    keys = {k: v for k, v in config.publish(vars(config)).items() if k not in ("name", "weights", "mtp_layers")}
    head = GR00TN17ActionHead(GR00TN17Config(**keys)).eval()
    token = values["action_head.mask_token"].clone().requires_grad_()
    named = {n.removeprefix("action_head."): t for n, t in values.items() if n.startswith("action_head.")}
    head.load_state_dict({name: tensor for name, tensor in named.items() if name != "mask_token"})
    shell = SimpleNamespace(action_head=head)
    losses, sampled = [], []
    for row in range(ROWS):
        features, tokens = eagle(config, batch, values, row)
        given = lerobot.inputs_of_head(config, batch, [row])
        seeing = {key: value for key, value in given.items() if not key.startswith("action")}
        state = {
            "backbone_features": features.detach(),
            "backbone_attention_mask": torch.ones_like(tokens).bool(),
            "image_mask": tokens == config.image_token_id,
        }
        dropped = bool(batch.state_dropped[row])
        hook = head.state_encoder.register_forward_hook(lambda *call, dropped=dropped: token if dropped else call[2])
        with lerobot.drawn(shell, batch, [row]):
            loss = head(BatchFeature(dict(state)), BatchFeature(given))["loss"]
            (loss / ROWS).backward()
            losses.append(loss.item() / ROWS)
            sampled.append(head.get_action(BatchFeature(dict(state)), BatchFeature(seeing))["action_pred"])
        hook.remove()
    total = OBJECTIVE.loss_sum(ours, batch) / ROWS
    total.backward()
    close(total, torch.tensor(sum(losses)))
    grads = {name: p.grad for name, p in head.named_parameters()} | {"mask_token": token.grad}
    for name, parameter in ours.action_head.named_parameters():
        assert (parameter.grad - grads[name]).norm() <= 1e-4 * grads[name].norm() + 1e-6, name
    with torch.no_grad():
        close(OBJECTIVE.outputs(ours, batch)["actions"], torch.cat(sampled), atol=1e-4)
    assert all(parameter.grad is not None for parameter in ours.parameters())
