"""X-VLA's files: weights in both published layouts, configs, job=forward, words, vectors, policy directories."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo.xvla.config import XvlaConfig
from zoo.xvla.florence import pixels
from zoo.xvla.layout import Actions, arm_state, check_sources
from zoo.xvla.processor import Draw, Processor, domains_of
from zoo.xvla.prompts import Prompts, stand_in
from zoo.xvla.spaces import SPACES
from zoo.xvla.weights import EMBEDDED, EMBEDDING, PROJECTION, THEIR_PROJECTION, original, weight_map

from engine.architecture import read_architecture
from engine.checkpoint.config import config_text, to_published
from engine.errors import UserError
from engine.family import load_family
from engine.policy.conventions import Camera, Conventions, Gripper, Space
from engine.policy.describe import short
from engine.policy.runtime import Observation, Runtime
from engine.policy.statistics import save, statistics
from tests.freezing import freeze
from tests.parity import lerobot_xvla as lerobot
from tests.parity.test_round_trip import raw, there_and_back
from tests.parity.test_xvla import CAMERAS, CASES, FIRST, close, observed
from tests.ranks import Ranks

CONFIG: XvlaConfig = dataclasses.replace(CASES["ee6d"][0], vocab_size=300)
FAMILY = load_family("xvla")
TASKS = [" pick_up the red block\n", "", "stack: 'cups', then stop and wait until somebody tells you to go on"]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return lerobot.policy(CONFIG, CAMERAS, 20, 20, seed=11)


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(config_text(config or to_published(FAMILY, CONFIG), "F32"))
    return folder


def as_lerobot(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `save_pretrained` stores it: of the tied embedding one name."""
    return {name: tensor.contiguous() for name, tensor in tensors.items() if name != EMBEDDED}


def as_older(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """lerobot's prefix before the remote code's names, with both names of the embedding."""
    found = {original(name): tensor.clone() for name, tensor in tensors.items()}
    return found | {THEIR_PROJECTION: tensors[PROJECTION].t().contiguous()}


def as_original(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The remote code's own names."""
    return {name.removeprefix("model."): tensor for name, tensor in as_older(tensors).items()}


def original_config() -> dict[str, Any]:
    """As the remote code writes it."""
    config = to_published(FAMILY, CONFIG)
    names = ("hidden_size", "depth", "num_heads", "mlp_ratio", "num_domains", "dim_time", "max_len_seq")
    head = {name: config[name] for name in (*names, "len_soft_prompts", "florence_config")}
    own = {"tokenizer_max_length": CONFIG.tokenizer_max_length, "num_denoising_steps": CONFIG.num_denoising_steps}
    own |= {"resize_imgs_with_padding": [CONFIG.image_size] * 2}  # that the published sizes are the defaults of
    return head | own | {"model_type": "xvla", "num_actions": CONFIG.chunk_size, "action_mode": "EE6D"}


def test_the_originals_names_are_those_that_lerobots_converter_reads(theirs: Any) -> None:
    values = theirs.state_dict()
    older = as_older(values)
    assert lerobot.theirs._is_vendored_florence_state_dict(older)
    back = lerobot.theirs._remap_vendored_florence_state_dict(older)
    assert set(back) == set(values) and all(torch.equal(back[name], values[name]) for name in values)
    assert len(set(older) - set(values)) > 60


@pytest.mark.parametrize("layout", ["lerobot", "original", pytest.param("older", marks=pytest.mark.slow)])
def test_every_byte_survives_and_lerobot_reads_it(ranks: Ranks, theirs: Any, tmp_path: Path, layout: str) -> None:
    own = theirs.state_dict()
    tensors = {"lerobot": as_lerobot, "original": as_original, "older": as_older}[layout](own)
    source = write(tmp_path / "source", tensors, original_config() if layout == "original" else None)
    out = there_and_back(ranks, source, "xvla", tmp_path, "native-fsdp2")
    assert raw(out) == raw(source)
    assert json.loads((out / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    if layout == "original":
        found = load_file(out / "model.safetensors")  # its loader wants its prefix
        save_file({f"model.{name}": tensor for name, tensor in found.items()}, out / "model.safetensors")
    settings = lerobot.settings(CONFIG, CAMERAS, 20, 20)
    read = lerobot.theirs.XVLAPolicy.from_pretrained(out, config=settings).state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in own.items())


def test_forward_gives_what_lerobot_gives(ranks: Ranks, theirs: Any, tmp_path: Path) -> None:
    """From the original's layout, three samples on two ranks: outputs, loss and gradients by published name."""
    source = write(tmp_path / "source", as_original(theirs.state_dict()), original_config())
    batch = observed("ee6d", 2)
    seen = torch.stack([pixels(images, CONFIG.image_size) for images in batch.images.values()], 1)
    inputs = {"image_input": seen, "input_ids": batch.tokens, "domain_id": batch.domains, "proprio": batch.state}
    inputs |= {"noise": batch.noise, "action": batch.actions, "time": batch.time}
    save_file({n: t.contiguous() for n, t in inputs.items()}, tmp_path / "batch.safetensors")
    given = [f"model.weights={source}", f"data.inputs={tmp_path / 'batch.safetensors'}", "grad=true", "job=forward"]
    config = freeze(tmp_path / "forward", "xvla", *given, "parallelism=fsdp2", "data.micro_batch_size=1")
    assert ranks.run(config, 2) == [0, 0], (config.parent / "result.json").read_text()
    found = load_file(config.parent / "outputs.safetensors")

    two = lerobot.policy(CONFIG, CAMERAS[:2], 20, 20)
    two.load_state_dict(theirs.state_dict())
    loss, prediction = lerobot.learned(two, batch, FIRST)
    loss.backward()
    close(found["loss"], loss, atol=1e-4)
    close(found["prediction"], prediction)
    close(found["actions"], lerobot.sampled(two, batch))
    wanted = {name: p.grad for name, p in two.named_parameters()}
    whole = torch.stack([grad.norm() for grad in wanted.values()]).norm()
    assert {name for name in found if name[:5] == "grad."} == {f"grad.{n}" for n in weight_map(CONFIG).parameters}
    for name in weight_map(CONFIG).parameters:
        assert (found[f"grad.{name}"] - wanted[name]).norm() <= 1e-4 * wanted[name].norm() + 1e-7 * whole, name


@pytest.mark.parametrize(("height", "width"), [(50, 50), (33, 20), (20, 33), (61, 50), (7, 50)])
def test_images_are_lerobots(theirs: Any, height: int, width: int) -> None:
    """Its normalisation, then its resizing, with bars on the left and on the top."""
    batch = observed("ee6d", 1)
    random = torch.Generator().manual_seed(1)
    batch.images[CAMERAS[0]] = torch.randint(0, 256, (2, height, width, 3), dtype=torch.uint8, generator=random)
    expected, _ = theirs._prepare_images(lerobot.observation(batch))
    torch.testing.assert_close(pixels(batch.images[CAMERAS[0]], 50), expected[:, 0], atol=1e-5, rtol=0)


def test_words_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """As lerobot's `TokenizerProcessorStep` calls it: begun, ended, cut and filled up; a stand-in of BART's form."""
    from transformers import AutoTokenizer

    folder = stand_in(TASKS, 300, tmp_path)
    tokens, mask = Prompts(folder, 12, 300)(TASKS)
    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    expected = theirs(TASKS, max_length=12, truncation=True, padding="max_length", return_tensors="pt")
    assert torch.equal(tokens, expected["input_ids"]) and torch.equal(mask, expected["attention_mask"].bool())
    assert tokens[1].tolist() == [0, 2, *[1] * 10] and tokens[2, -1] == 2, "BART's <s>, </s> and <pad>"


LIBERO = Conventions(
    "xvla",
    "libero_panda",
    state=Space(("x", "y", "z", "a", "b", "c", "left", "right"), rotation="axis_angle"),
    action=Space(("x", "y", "z", "a", "b", "c", "grip"), rotation="axis_angle", gripper=Gripper(-1, 1)),
    control="absolute",
)


def poses(rows: int, size: int, seed: int = 0) -> np.ndarray:
    """Positions and rotation vectors with angles below pi, grippers -1 or 1 behind them."""
    random = np.random.default_rng(seed)
    turns = random.normal(size=(rows, 3))
    turns *= random.uniform(0.01, 3.1, size=(rows, 1)) / np.linalg.norm(turns, axis=-1, keepdims=True)
    rest = random.choice([-1.0, 1.0], size=(rows, size - 6))
    return np.concatenate([random.normal(size=(rows, 3)), turns, rest], -1)


def test_vectors_are_laid_out_as_lerobot_lays_out_libero(tmp_path: Path) -> None:
    """Its step for observations makes the same state; its step behind the model gives our actions back."""
    from lerobot.lerobot_types import TransitionKey
    from lerobot.policies.xvla.processor_xvla import LiberoProcessorStep, XVLARotation6DToAxisAngleProcessorStep
    from lerobot.processor.converters import create_transition
    from scipy.spatial.transform import Rotation

    acted, stood = poses(40, 7), poses(40, 8, seed=1)
    layout = Actions(LIBERO, statistics([acted]), "ee6d", SPACES["ee6d"])
    ours = layout(acted)
    matrix = Rotation.from_rotvec(acted[:, 3:6]).as_matrix()
    columns = np.concatenate([matrix[:, :, 0], matrix[:, :, 1]], -1)
    np.testing.assert_allclose(ours, np.concatenate([acted[:, :3], columns, (acted[:, 6:] + 1) / 2], -1), atol=1e-12)
    np.testing.assert_allclose(layout.inverse(ours), acted, atol=1e-5)
    step = XVLARotation6DToAxisAngleProcessorStep()
    back = step(create_transition(action=torch.from_numpy(ours)))[TransitionKey.ACTION]
    np.testing.assert_allclose(back, acted, atol=1e-3)  # it adds 1e-6 to norms, and computes in float32

    eef = {
        "pos": torch.from_numpy(stood[:, :3]),
        "mat": torch.from_numpy(Rotation.from_rotvec(stood[:, 3:6]).as_matrix()),
    }
    seen = LiberoProcessorStep().observation({"observation.robot_state": {"eef": eef}})["observation.state"]
    own = arm_state(stood, "axis_angle", 20)
    np.testing.assert_allclose(np.pad(own, ((0, 0), (0, 10))), seen, atol=1e-6)

    grown = np.concatenate([acted, acted[::-1]], -1)  # two arms
    turned = dataclasses.replace(LIBERO, action=dataclasses.replace(LIBERO.action, gripper=Gripper(1, -1)))
    two = Actions(turned, statistics([grown]), "ee6d", SPACES["ee6d"])
    np.testing.assert_allclose(two(grown)[:, 10:19], ours[::-1, :9])
    np.testing.assert_allclose(two(grown)[:, [9, 19]], (1 - grown[:, [6, 13]]) / 2)
    np.testing.assert_allclose(two.inverse(two(grown)), grown, atol=1e-5)


def test_steps_and_unknown_grippers_are_refused() -> None:
    """lerobot #3401: relative control with absolute targets trains at a loss near 90, and succeeds never."""
    measured = statistics([poses(40, 7)])
    for control in ("delta", "delta_of_target"):
        own = dataclasses.replace(LIBERO, control=control)
        for mode in ("ee6d", "agibot_ee6d", "joint"):
            with pytest.raises(UserError, match=rf"control={control}: model.action_mode={mode} learns absolute poses"):
                Actions(own, measured, mode, SPACES[mode])
        assert Actions(own, measured, "auto", SPACES["auto"]).size == 7
        with pytest.raises(UserError, match=f"control={control}"):
            check_sources([LIBERO, own], "ee6d")
    turned = dataclasses.replace(LIBERO, action=dataclasses.replace(LIBERO.action, gripper=Gripper(1, -1)))
    with pytest.raises(UserError, match="unlike rotations or grippers"):
        check_sources([LIBERO, turned], "ee6d")
    check_sources([LIBERO, turned], "auto")
    silent = dataclasses.replace(LIBERO, action=dataclasses.replace(LIBERO.action, gripper=None))
    with pytest.raises(
        UserError, match=r"action\[6\] is a gripper from -1 to 1, and model.action_mode=ee6d learns shares"
    ):
        Actions(silent, measured, "ee6d", SPACES["ee6d"])
    with pytest.raises(UserError, match=r"action has 5 numbers \(rotation: axis_angle\); model.action_mode=ee6d takes"):
        Actions(LIBERO, statistics([poses(40, 7)[:, :5]]), "ee6d", SPACES["ee6d"])


def test_times_are_stratified_over_a_step_and_noise_is_each_samples_own() -> None:
    """t = (u + place / 8) mod (1 - 1e-5), u uniform: one time in each eighth of every step."""
    draw = Draw(3, group=8)
    times = np.array([draw.time(sample) for sample in range(8 * 300)]).reshape(300, 8)
    turned = np.sort((times - times[:, :1]) % 1, axis=1)
    np.testing.assert_allclose(turned, np.broadcast_to(np.arange(8) / 8, turned.shape), atol=2e-5)
    assert times.min() >= 0 and times.max() < 1 and abs(np.mean(times[:, 0] < 0.3) - 0.3) < 0.08
    noise = np.stack([draw.noise(sample, (5, 20)) for sample in range(200)])
    assert abs(noise.mean()) < 0.03 and abs(noise.var() - 1) < 0.03 and not np.array_equal(noise[0], noise[1])


def test_a_source_has_the_domain_of_its_robot_or_the_one_that_is_set() -> None:
    config = XvlaConfig(name="base")
    assert domains_of(config, ["libero_panda", "arm", "widowx", "airbot"]) == [3, 0, 0, 18]
    assert domains_of(dataclasses.replace(config, domain_ids=[7]), ["calvin_panda", "arm"]) == [7, 7]
    assert domains_of(dataclasses.replace(config, domain_ids=[7, 2]), ["calvin_panda", "arm"]) == [7, 2]


def test_a_policy_directory_acts_as_lerobot_does(theirs: Any, tmp_path: Path) -> None:
    """From images, state and words to actions in the robot's units, each observation alone or in a batch."""
    own = dataclasses.replace(
        LIBERO, cameras=tuple(Camera(short(name), 9, 14) for name in CAMERAS), horizon=CONFIG.chunk_size
    )
    values = {"observation.state": poses(40, 8), "action": poses(40, 7)}
    measured = {name: statistics([array]) for name, array in values.items()}
    folder = write(
        tmp_path / "policy", as_original(theirs.state_dict()), original_config() | {"tokenizer_max_length": 9}
    )
    for file in stand_in(TASKS, CONFIG.vocab_size, tmp_path).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save(measured, folder)
    own.save(folder)
    policy = Runtime(folder, torch.device("cpu"))
    random = np.random.default_rng(1)
    seen = [
        Observation(
            {short(name): random.integers(0, 256, (9, 14, 3), np.uint8) for name in CAMERAS[: 3 - row]},
            *(values["observation.state"][row], TASKS[row], 40 + row),
        )
        for row in range(2)
    ]
    actions = policy.infer(seen)
    processor = Processor(CONFIG, Prompts(folder, 9, 300), own, measured["action"], [3], Draw(0, "serve"))
    for row, one in enumerate(seen):
        batch = processor(policy._batch([one]))  # names of cameras and numbers, as above they are lerobot's
        batch.images = {f"observation.images.{name}": image for name, image in batch.images.items()}
        batch.image_masks = {f"observation.images.{name}": mask for name, mask in batch.image_masks.items()}
        assert batch.domains.tolist() == [3] and batch.tokens.shape == (1, 9)
        batch.state = torch.nn.functional.pad(batch.state, (0, 10))
        wanted = processor.actions(lerobot.sampled(theirs, batch))
        close(torch.from_numpy(actions[row])[None], wanted, atol=1e-3)
        np.testing.assert_allclose(policy.infer([one])[0], actions[row], atol=1e-3)
    with pytest.raises(UserError, match="control=delta"):
        dataclasses.replace(own, control="delta").save(folder)
        Runtime(folder, torch.device("cpu"))


def test_published_configs_are_read_and_written_as_lerobot_does(tmp_path: Path) -> None:
    from lerobot.configs.policies import PreTrainedConfig

    base = XvlaConfig(name="base")
    (tmp_path / "config.json").write_text(config_text(to_published(FAMILY, base), "F32"))
    config = PreTrainedConfig.from_pretrained(tmp_path)
    assert (config.type, config.chunk_size, config.action_mode, config.max_state_dim) == ("xvla", 30, "ee6d", 20)
    florence = config.get_florence_config()
    assert florence.vision_config.embed_dim == [256, 512, 1024, 2048] and florence.text_config.encoder_layers == 12
    config.save_pretrained(tmp_path)  # as lerobot writes it itself, its training settings included
    read = read_architecture(tmp_path, FAMILY)
    assert read.name == "base" and vars(read) == vars(base) | {"mtp_layers": 0}
    native = {"vision_config": florence.vision_config.to_dict(), "text_config": florence.text_config.to_dict()}
    published = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(published | {"florence_config": native}))  # transformers' spelling
    assert vars(read_architecture(tmp_path, FAMILY)) == vars(base) | {"mtp_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(published | {"action_mode": "franka_joint7"}))
    with pytest.raises(Exception, match="action_mode='franka_joint7'; ee6d, agibot_ee6d, joint, auto are known"):
        read_architecture(tmp_path, FAMILY)


def test_tensors_are_those_of_the_key_list() -> None:
    shapes = weight_map(XvlaConfig(name="base")).parameters
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 879_482_456
    assert len(shapes) == 901 and shapes[EMBEDDING] == (51289, 1024)
    assert shapes["model.transformer.action_encoder.fc.weight"] == (30, 73728)
