"""GR00T N1.7's files: weights in NVIDIA's and lerobot's layouts, prompts, images and numbers, a policy directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo.groot_n17.config import GrootN17Config
from zoo.groot_n17.weights import LEROBOT, OUTPUT, weight_map

from engine.architecture import read_architecture
from engine.checkpoint.config import config_text, to_published
from engine.data.policy_batch import PolicyBatch
from engine.policy.conventions import Camera, Conventions, Space
from engine.policy.groot.pixels import patches, pixels
from engine.policy.groot.processor import Draw, Processor
from engine.policy.groot.prompts import FORM, QWEN_CHAT, Prompts
from engine.policy.runtime import Observation, Runtime
from engine.policy.stand_in import stand_in
from engine.policy.statistics import Statistics, save, statistics
from tests.freezing import freeze
from tests.parity import lerobot_groot as lerobot
from tests.parity.test_groot import ACTION, CAMERAS, CASES, ROWS, STATE, close, observed, seen
from tests.parity.test_round_trip import raw, there_and_back
from tests.ranks import Ranks

CONFIG = CASES["two_cameras"]
TASKS = ["Pick up the RED_block, now!", "", "stack: 'cups'"]


@pytest.fixture(scope="module")
def theirs() -> Any:
    model = lerobot.model(CONFIG)
    lerobot.randomise(model, seed=11)
    return model


def write(folder: Path, tensors: dict[str, Tensor], config: GrootN17Config = CONFIG) -> Path:
    folder.mkdir()
    stored = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(config_text(to_published(lerobot.FAMILY, config), "F32"))
    return folder


def saved_by_lerobot(base: Path, folder: Path) -> Path:
    """What its policy writes when it was made of NVIDIA's directory `base`."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.groot.configuration_groot import GrootConfig
    from lerobot.policies.groot.modeling_groot import GrootPolicy

    settings = GrootConfig(
        device="cpu",
        base_model_path=str(base),
        chunk_size=7,
        n_action_steps=7,
        use_bf16=False,
        input_features={
            "observation.images.top": PolicyFeature(FeatureType.VISUAL, (3, 24, 16)),
            "observation.state": PolicyFeature(FeatureType.STATE, (STATE,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION,))},
    )
    with lerobot.shrunk(CONFIG):
        GrootPolicy(settings).save_pretrained(folder)
    return folder


def test_every_byte_survives_in_nvidias_layout_and_lerobot_reads_it(ranks: Ranks, theirs: Any, tmp_path: Path) -> None:
    """Its raw loader; the tied output head is stored."""
    own = theirs.state_dict()
    source = write(tmp_path / "source", own)
    assert OUTPUT in load_file(source / "model.safetensors")
    out = there_and_back(ranks, source, "groot_n17", tmp_path, "native-fsdp2")
    assert raw(out) == raw(source)
    with lerobot.shrunk(CONFIG):
        read = lerobot.theirs.GR00TN17.from_pretrained(str(out)).state_dict()
    for name, tensor in own.items():
        assert torch.equal(read[name], tensor), name


def test_every_byte_survives_in_lerobots_layout(ranks: Ranks, theirs: Any, tmp_path: Path) -> None:
    base = write(tmp_path / "base", theirs.state_dict())
    source = saved_by_lerobot(base, tmp_path / "source")
    settings = (source / "config.json").read_text()
    assert json.loads(settings)["type"] == "groot"
    (source / "config.json").write_text((base / "config.json").read_text())  # its own says no sizes
    assert all(name.startswith(LEROBOT) for name in load_file(source / "model.safetensors"))
    out = there_and_back(ranks, source, "groot_n17", tmp_path, "native-fsdp2")
    assert raw(out) == raw(source)


def test_lerobots_own_config_is_read_as_the_published_size(tmp_path: Path) -> None:
    from lerobot.policies.groot.configuration_groot import GrootConfig

    GrootConfig(device="cpu").save_pretrained(tmp_path)
    read = read_architecture(tmp_path, lerobot.FAMILY)
    usual = vars(GrootN17Config(name="3b"))
    assert {key: value for key, value in vars(read).items() if key != "mtp_layers"} == {
        key: value for key, value in usual.items() if key != "mtp_layers"
    }


@pytest.mark.parametrize(("height", "width"), [(480, 640), (256, 256), (33, 50), (300, 200)])
def test_images_are_lerobots(height: int, width: int) -> None:
    """As it computes them on a GPU: on a CPU it rounds once more, between rows and columns."""
    from lerobot.policies.groot.processor_groot import _transform_n1_7_image_for_vlm_torch as transform
    from transformers import Qwen2VLImageProcessor

    config = GrootN17Config(name="3b")
    image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    given = {"image_crop_size": config.image_crop_size, "image_target_size": config.image_target_size}
    with mock.patch("torchvision.transforms.v2.functional._geometry._do_native_uint8_resize_on_cpu", lambda _: False):
        wanted = transform(image, **given, shortest_image_edge=None, crop_fraction=None)
    ours = pixels(image.permute(1, 2, 0)[None], *config.view)
    assert (ours[0] - (wanted.float() / 127.5 - 1)).abs().max() <= 1.01 / 127.5
    sizes = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor = Qwen2VLImageProcessor(**sizes, **half, min_pixels=65536, max_pixels=16777216)
    expected = processor(images=[wanted], return_tensors="pt")
    assert expected["image_grid_thw"].tolist() == [[1, 16, 16]]
    torch.testing.assert_close(patches(wanted[None].float() / 127.5 - 1, 16, 2, 2)[0], expected["pixel_values"])


def processor_of(folder: Path, measured: dict[str, Statistics], config: GrootN17Config, stream: str) -> Processor:
    prompts = Prompts(folder, config.vocab_size, config.image_token_id, config.image_tokens, QWEN_CHAT)
    return Processor(config, prompts, *measured.values(), 4, Draw(1, stream))


def test_prompts_and_numbers_are_lerobots(tmp_path: Path) -> None:
    """Normalised and cut state and actions, chunks filled up, instructions, tokens, and the way back."""
    from lerobot.lerobot_types import TransitionKey
    from lerobot.policies.groot.processor_groot import GrootN17PackInputsStep, _unnormalize_min_max
    from lerobot.processor.converters import create_transition
    from transformers import AutoTokenizer

    random = np.random.default_rng(0)
    state, action = random.normal(size=(200, STATE)) * 3, random.normal(size=(200, ACTION)) + 1
    measured = {"observation.state": statistics([state]), "action": statistics([action])}
    config = GrootN17Config(**vars(CONFIG) | {"vocab_size": 400, "image_token_id": 5})
    folder = stand_in(FORM, TASKS, 400, tmp_path)
    batch = observed(config, ragged=True)
    batch.state = torch.from_numpy(state[:ROWS] * 1.5).float()  # beyond both quantiles as well
    batch.actions = torch.from_numpy(action[: ROWS * 4].reshape(ROWS, 4, -1)).float()
    batch.action_pad = torch.zeros(ROWS, 4, dtype=torch.bool)
    batch.action_pad[1, 2:] = True
    batch.tasks, batch.noise, batch.time, batch.embodiments = TASKS, None, None, []
    processor = processor_of(folder, measured, config, "validation")
    made = processor(batch)

    ends = {n: {"min": torch.tensor(s.q01), "max": torch.tensor(s.q99)} for n, s in measured.items()}
    sizes = {"action_horizon": 7, "valid_action_horizon": 7, "max_state_dim": 9, "max_action_dim": 8}
    step = GrootN17PackInputsStep(**sizes, stats=ends, embodiment_mapping={"new_embodiment": 4})
    words = {"task": TASKS, "action_is_pad": batch.action_pad}
    packed = step(create_transition({"observation.state": batch.state}, batch.actions, complementary_data=words))
    comp = packed[TransitionKey.COMPLEMENTARY_DATA]
    close(made.state, packed[TransitionKey.OBSERVATION]["state"][:, 0, :STATE])
    close(made.actions, packed[TransitionKey.ACTION][..., :ACTION])
    assert torch.equal(~made.action_pad, comp["action_mask"][..., 0].bool())
    assert made.embodiments == comp["embodiment_id"].tolist()

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for row, text in enumerate(comp["language"]):
        images = [{"type": "image"}] * int(sum(mask[row] for mask in batch.image_masks.values()))
        said = [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]
        whole = tokenizer.apply_chat_template(said, tokenize=False)
        whole = whole.replace("<|image_pad|>", "<|image_pad|>" * config.image_tokens)
        assert made.tokens[row][made.token_mask[row]].tolist() == tokenizer(whole)["input_ids"]
    given = torch.randn(ROWS, 7, 8, generator=torch.Generator().manual_seed(2)) * 1.5
    low, high = measured["action"].q01, measured["action"].q99
    expected = _unnormalize_min_max(given[:, :4, :ACTION].numpy(), low, high)
    np.testing.assert_allclose(processor.actions(given).numpy(), expected, atol=1e-5)
    alone = processor(batch.take([1]))
    assert torch.equal(alone.noise[0], made.noise[1]) and alone.time[0] == made.time[1], "a sample has its own noise"
    assert made.state_dropped is None, "states are dropped in training alone"


def test_times_and_dropped_states_are_drawn_as_published() -> None:
    """0.999 (1 - Beta(1.5, 1)), whose mean is 0.999 * 0.4; a fifth of the states is zeros, and a fifth is dropped."""
    drawn = [Draw(3)(sample, CONFIG) for sample in range(4000)]
    noise, times, zeros, dropped = (np.array(part) for part in zip(*drawn, strict=True))
    assert abs(times.mean() - 0.3996) < 0.01 and times.min() >= 0 and times.max() <= 0.999
    assert abs(np.mean(times > 0.999 * 0.5) - 0.5**1.5) < 0.02
    assert abs(zeros.mean() - 0.2) < 0.02 and abs(dropped.mean() - 0.2) < 0.02
    assert abs((zeros & dropped).mean() - 0.04) < 0.01
    assert abs(noise.mean()) < 0.02 and abs(noise.var() - 1) < 0.02


def test_a_policy_directory_acts_as_lerobot_does(theirs: Any, tmp_path: Path) -> None:
    """From images, state and words to actions in units, each observation alone or in a batch; one lacks a camera."""
    random = np.random.default_rng(1)
    values = {"observation.state": random.normal(size=(90, STATE)), "action": random.normal(size=(90, ACTION)) * 4}
    measured = {name: statistics([array]) for name, array in values.items()}
    config = GrootN17Config(**vars(CONFIG) | {"vocab_size": 400, "image_token_id": 5, "embodiments": [3]})
    theirs = lerobot.model(config)
    lerobot.randomise(theirs, seed=13)
    folder = write(tmp_path / "policy", theirs.state_dict(), config)
    for file in stand_in(FORM, TASKS, 400, tmp_path).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save(measured, folder)
    spaces = {"state": Space(tuple("abcde")), "action": Space(tuple("xyz"))}
    Conventions("groot_n17", "arm", tuple(Camera(n, 9, 14) for n in CAMERAS), **spaces, horizon=4).save(folder)

    policy = Runtime(folder, torch.device("cpu"))
    shown = [{n: random.integers(0, 256, (9, 14, 3), np.uint8) for n in CAMERAS[: 2 - row]} for row in range(2)]
    asked = [Observation(shown[row], values["observation.state"][row], TASKS[row], 40 + row) for row in range(2)]
    actions = policy.infer(asked)
    processor = processor_of(folder, measured, config, "serve")
    processor.draw = Draw(0, "serve")
    batch: PolicyBatch = processor(policy._batch(asked))
    low, high = measured["action"].q01, measured["action"].q99
    for row, one in enumerate(asked):
        inputs = lerobot.inputs(config, batch, seen(config, batch), [row])
        sampled = lerobot.sample(theirs, inputs, batch, [row])[0, :4, :ACTION].clamp(-1, 1)
        np.testing.assert_allclose(actions[row], (sampled.numpy() + 1) / 2 * (high - low) + low, atol=1e-3)
        np.testing.assert_allclose(policy.infer([one])[0], actions[row], atol=1e-4)


def test_forward_gives_what_lerobot_gives(ranks: Ranks, theirs: Any, tmp_path: Path) -> None:
    """Three samples on two ranks, prompts filled up on the left: outputs, loss and gradients by published name."""
    source = write(tmp_path / "source", theirs.state_dict())
    batch = observed(CONFIG, ragged=False)
    rows = list(range(ROWS))
    inputs = lerobot.inputs(CONFIG, batch, seen(CONFIG, batch), rows)
    left = (
        torch.nn.functional.pad(inputs["input_ids"], (2, 0)),
        torch.nn.functional.pad(inputs["attention_mask"], (2, 0)),
    )
    given = {f"images.{n}": image.contiguous() for n, image in enumerate(seen(CONFIG, batch).values())}
    given |= {"input_ids": left[0], "attention_mask": left[1], "state": batch.state, "action": batch.actions}
    given |= {"embodiment_id": inputs["embodiment_id"], "noise": batch.noise, "time": batch.time}
    save_file(given, tmp_path / "batch.safetensors")
    words = [f"model.weights={source}", f"data.inputs={tmp_path / 'batch.safetensors'}", "grad=true", "job=forward"]
    config = freeze(tmp_path / "forward", "groot_n17", *words, "parallelism=fsdp2", "data.micro_batch_size=1")
    assert ranks.run(config, 2) == [0, 0], (config.parent / "result.json").read_text()
    found = load_file(config.parent / "outputs.safetensors")
    theirs.zero_grad()
    loss, velocity = lerobot.loss(theirs, inputs, batch, rows)
    loss.backward()
    close(found["loss"], loss.detach())
    close(found["velocity"], velocity)
    close(found["actions"], lerobot.sample(theirs, inputs, batch, rows), atol=1e-4)
    learned = set(weight_map(CONFIG).published) - weight_map(CONFIG).kept
    assert {name for name in found if name.startswith("grad.")} == {f"grad.{name}" for name in learned}
    for name, parameter in theirs.named_parameters():
        if name in learned:
            assert (found[f"grad.{name}"] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-6, name
