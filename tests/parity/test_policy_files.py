"""Pi0.5's files: weights in the layouts that public code reads and writes, job=forward, prompts and numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo.pi05.config import Pi05Config
from zoo.pi05.processor import Draw, Processor
from zoo.pi05.prompts import Prompts, stand_in
from zoo.pi05.vision import pixels
from zoo.pi05.weights import EMBEDDING, HEADS, VISION, weight_map

from engine.architecture import read_architecture
from engine.checkpoint.config import config_text, to_published
from engine.family import load_family
from engine.policy.conventions import Camera, Conventions, Space
from engine.policy.describe import short
from engine.policy.runtime import Observation, Runtime
from engine.policy.statistics import save, statistics
from tests.freezing import freeze
from tests.parity import lerobot_pi05 as lerobot
from tests.parity.test_policies import ACTION, CAMERAS, CASES, ROWS, STATE, as_lerobot, close, observed
from tests.parity.test_round_trip import raw, there_and_back
from tests.ranks import Ranks
from tests.unit.robot_sets import make

CONFIG = CASES["unlike_widths"]
FAMILY = load_family("pi05")


@pytest.fixture(scope="module")
def theirs() -> Any:
    policy = lerobot.policy(CONFIG, CAMERAS, STATE, ACTION)
    lerobot.randomise(policy, seed=11)
    return policy


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(config_text(to_published(FAMILY, CONFIG), "F32"))
    return folder


def as_openpi(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """openpi's `PI0Pytorch` with the transformers of its day: no prefix, another level in the vision tower, a tied head
    of which safetensors keeps one name.
    """
    named = {n.replace("vision_tower.", "vision_tower.vision_model."): t for n, t in tensors.items() if n != EMBEDDING}
    named[HEADS[0]] = tensors[EMBEDDING]
    return {name.removeprefix("model."): tensor for name, tensor in named.items()}


def as_mixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """bf16 with the vision tower and the norms in fp32, as lerobot holds it; PaliGemma's head left out."""
    wide = ("vision_tower", "multi_modal_projector", "layernorm", "model.norm")
    kept = {n: t for n, t in tensors.items() if n != HEADS[0]}
    return {n: t if any(word in n for word in wide) else t.to(torch.bfloat16) for n, t in kept.items()}


@pytest.mark.parametrize("layout", ["lerobot", "openpi", pytest.param("mixed", marks=pytest.mark.slow)])
def test_every_byte_survives_and_lerobot_reads_it(ranks: Ranks, theirs: Any, tmp_path: Path, layout: str) -> None:
    rewrite = {"lerobot": dict, "openpi": as_openpi, "mixed": as_mixed}[layout]
    own = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    source = write(tmp_path / "source", rewrite(own))
    out = there_and_back(ranks, source, "pi05", tmp_path, "native-fsdp2")
    assert raw(out) == raw(source)
    if layout == "mixed":
        return  # its loader wants both heads
    settings = lerobot.settings(CONFIG, CAMERAS, STATE, ACTION)
    if layout == "openpi":
        # Its loader knows no level `vision_model`, which its own transformers has not.
        found = load_file(out / "model.safetensors")
        save_file({n.replace("vision_model.", ""): t for n, t in found.items()}, out / "model.safetensors")
    with lerobot.shrunk(CONFIG):
        read = lerobot.theirs.PI05Policy.from_pretrained(out, config=settings, strict=False).state_dict()
    for name, tensor in own.items():
        if name != HEADS[0] or layout == "lerobot":
            assert torch.equal(read[name], tensor), name


def forward(ranks: Ranks, theirs: Any, weights: Path, place: Path, *more: str) -> tuple[Any, Any, dict[str, Tensor]]:
    """The batch, what lerobot's model is called with, and what job=forward on two ranks makes of it."""
    batch = observed(CONFIG)
    called = images, masks, tokens, token_mask = as_lerobot(theirs, batch)
    inputs = {f"images.{n}": image.contiguous() for n, image in enumerate(images)}
    inputs |= {f"img_masks.{n}": mask for n, mask in enumerate(masks)} | {"tokens": tokens, "masks": token_mask}
    inputs |= {"actions": batch.actions, "noise": batch.noise, "time": batch.time}
    save_file(inputs, place / "batch.safetensors")
    given = [f"model.weights={weights}", f"data.inputs={place / 'batch.safetensors'}", "job=forward", *more]
    config = freeze(place / "forward", "pi05", *given, "parallelism=fsdp2", "data.micro_batch_size=1")
    assert ranks.run(config, 2) == [0, 0], (config.parent / "result.json").read_text()
    return batch, called, load_file(config.parent / "outputs.safetensors")


def test_forward_gives_what_lerobot_gives(ranks: Ranks, theirs: Any, tmp_path: Path) -> None:
    """Three samples on two ranks, one of them alone: outputs, loss and gradients by published name."""
    source = write(tmp_path / "source", {n: t.contiguous() for n, t in theirs.state_dict().items()})
    batch, called, found = forward(ranks, theirs, source, tmp_path, "grad=true")
    images, masks, tokens, token_mask = called
    padded = torch.nn.functional.pad(batch.actions, (0, CONFIG.max_action_dim - ACTION))
    theirs.zero_grad()
    errors = theirs.model.forward(images, masks, tokens, token_mask, padded, batch.noise, batch.time)
    loss = errors[..., :ACTION].mean()
    loss.backward()
    close(found["loss"], loss)
    close((batch.noise - padded - found["velocity"]).square(), errors, atol=1e-4)
    close(found["actions"], lerobot.sample(theirs, images, masks, tokens, token_mask, noise=batch.noise), atol=1e-4)
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    learned = {n for n in weight_map(CONFIG).published if n not in weight_map(CONFIG).unlearned | set(HEADS)}
    assert {name for name in found if name.startswith("grad.")} == {f"grad.{name}" for name in learned}
    for name in learned:
        assert (found[f"grad.{name}"] - wanted[name]).norm() <= 1e-4 * wanted[name].norm() + 1e-7, name


@pytest.mark.slow
def test_adapters_learn_and_are_lerobots_through_peft(ranks: Ranks, theirs: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    source = write(tmp_path / "source", {n: t.contiguous() for n, t in theirs.state_dict().items()})
    for file in stand_in([], CONFIG.vocab_size, tmp_path).iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    data = [f"data.path={make(tmp_path / 'set', lengths=(6, 9)).folder}", "data.held_out=0", "data.global_batch_size=4"]
    lora = ["task=lora", "task.lora.r=2", "task.lora.targets=[q_proj,v_proj,fc1,dense]", "optim.lr=0.02"]
    words = [*data, *lora, f"model.weights={source}", "schedule.steps=4", "schedule.warmup_steps=0", "parallelism=ddp2"]
    config = freeze(tmp_path / "lora", "pi05", *words, "data.micro_batch_size=1")
    assert ranks.run(config, 2) == [0, 0], (config.parent / "result.json").read_text()
    out = config.parent / "hf"
    files = {file.name for file in out.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "statistics.json", "conventions.json"} <= files
    batch, called, found = forward(ranks, theirs, out, tmp_path)
    policy = lerobot.policy(CONFIG, CAMERAS, STATE, ACTION)
    policy.load_state_dict(theirs.state_dict())
    padded = torch.nn.functional.pad(batch.actions, (0, CONFIG.max_action_dim - ACTION))
    losses = []
    for _ in range(2):
        with torch.no_grad():
            errors = policy.model.forward(*called, padded, batch.noise, batch.time)
        losses.append(errors[..., :ACTION].mean())
        if len(losses) == 1:
            PeftModel.from_pretrained(policy, out)  # puts the adapters into the policy itself
    close(found["loss"], losses[1])
    assert abs(losses[1] - losses[0]) > 1e-3 * losses[0], "the adapters do something"


@pytest.mark.parametrize(("height", "width"), [(28, 28), (33, 20), (7, 50), (61, 28), (1, 3)])
def test_images_are_lerobots(theirs: Any, height: int, width: int) -> None:
    images = torch.randint(0, 256, (2, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    if min(height, width) * CONFIG.image_size < max(height, width):
        pytest.skip("nothing is left of the shorter side")
    seen = {CAMERAS[0]: images.permute(0, 3, 1, 2).float() / 255}
    expected, _ = theirs._preprocess_images(seen)
    torch.testing.assert_close(pixels(images, CONFIG.image_size), expected[0], atol=1e-6, rtol=0)


def test_prompts_and_numbers_are_lerobots(tmp_path: Path) -> None:
    """Normalised state and actions, the prompt with its bins, and the way back; tokens as transformers makes them."""
    from transformers import AutoTokenizer

    random = np.random.default_rng(0)
    state, action = random.normal(size=(200, STATE)) * 3, random.normal(size=(200, ACTION)) + 1
    measured = {"observation.state": statistics([state]), "action": statistics([action])}
    theirs = {n: {q: torch.tensor(getattr(s, q)).float() for q in ("q01", "q99")} for n, s in measured.items()}
    batch = observed(CONFIG)
    batch.state = torch.from_numpy(state[:ROWS] * 1.5).float()  # beyond both quantiles as well
    batch.actions, batch.tasks = torch.from_numpy(action[: ROWS * 5].reshape(ROWS, 5, -1)).float(), lerobot.TASKS
    batch.noise = batch.time = None
    settings = lerobot.settings(CONFIG, CAMERAS, STATE, ACTION)
    wanted = lerobot.processed(settings, theirs, batch.state, batch.actions)

    folder = stand_in(lerobot.TASKS, 400, tmp_path)
    config = Pi05Config(**vars(CONFIG) | {"vocab_size": 400, "tokenizer_max_length": 40})
    processor = Processor(config, Prompts(folder, 40, 400), *measured.values(), Draw(1))
    made = processor(batch)
    close(made.state, wanted[0])
    close(made.actions, wanted[1])
    close(processor.actions(torch.nn.functional.pad(made.actions, (0, 4))), wanted[3])
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    expected = tokenizer(wanted[2], max_length=40, truncation=True, padding="max_length", return_tensors="pt")
    assert torch.equal(made.tokens, expected["input_ids"])
    assert torch.equal(made.token_mask, expected["attention_mask"].bool())
    assert made.token_mask.sum(1).min() < 40 < len(tokenizer(wanted[2][0])["input_ids"]), "one is cut, one filled up"
    assert made.noise.shape == (ROWS, 5, config.max_action_dim)
    alone = processor(batch.take([1]))
    assert torch.equal(alone.noise[0], made.noise[1]) and alone.time[0] == made.time[1], "a sample has its own noise"


def test_a_policy_directory_acts_as_lerobot_does(theirs: Any, tmp_path: Path) -> None:
    """From images, state and words to actions in units, each observation alone or in a batch; one lacks a camera."""
    random = np.random.default_rng(1)
    values = {"observation.state": random.normal(size=(90, STATE)), "action": random.normal(size=(90, ACTION)) * 4}
    measured = {name: statistics([array]) for name, array in values.items()}
    folder = write(tmp_path / "policy", {n: t.contiguous() for n, t in theirs.state_dict().items()})
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(keys | {"tokenizer_max_length": 60}))
    for file in stand_in(lerobot.TASKS, CONFIG.vocab_size, tmp_path).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save(measured, folder)
    cameras = tuple(Camera(short(name), 9, 14) for name in CAMERAS)
    spaces = {"state": Space(tuple("abcde")), "action": Space(tuple("xyz"))}
    Conventions("pi05", "arm", cameras, **spaces, horizon=CONFIG.chunk_size, replan=1).save(folder)

    policy = Runtime(folder, torch.device("cpu"))
    seen = [
        Observation(
            {short(name): random.integers(0, 256, (9, 14, 3), np.uint8) for name in CAMERAS[: 3 - row]},
            *(values["observation.state"][row], lerobot.TASKS[row], 40 + row),
        )
        for row in range(2)
    ]
    actions = policy.infer(seen)
    for row, one in enumerate(seen):
        images = {
            f"observation.images.{n}": torch.tensor(i)[None].permute(0, 3, 1, 2) / 255 for n, i in one.images.items()
        }
        state = torch.tensor(one.state[None]).float()
        settings = lerobot.settings(CONFIG, CAMERAS, STATE, ACTION)
        theirs_of = {n: {q: torch.tensor(getattr(s, q)).float() for q in ("q01", "q99")} for n, s in measured.items()}
        _, _, prompts, _ = lerobot.processed(settings, theirs_of, state.expand(3, -1), torch.zeros(3, 1, ACTION))
        tokens, mask = Prompts(folder, 60, CONFIG.vocab_size)([prompts[row]])
        noise = torch.from_numpy(Draw(0, "serve")(40 + row, (CONFIG.chunk_size, CONFIG.max_action_dim), CONFIG)[0])[
            None
        ]
        sampled = lerobot.sample(theirs, *theirs._preprocess_images(images), tokens, mask, noise=noise)
        low, high = (torch.tensor(getattr(measured["action"], q)).float() for q in ("q01", "q99"))
        wanted = (sampled[..., :ACTION] + 1) * (high - low) / 2 + low  # lerobot's inverse of quantiles
        close(torch.from_numpy(actions[row])[None], wanted, atol=1e-3)
        np.testing.assert_allclose(policy.infer([one])[0], actions[row], atol=1e-4)


def test_times_are_drawn_as_published() -> None:
    """0.999 Beta(1.5, 1) + 0.001, whose mean is 0.999 * 0.6 + 0.001; noise of mean 0 and variance 1."""
    drawn = [Draw(3)(sample, (2, 4), CONFIG) for sample in range(4000)]
    times, noise = np.array([time for _, time in drawn]), np.stack([noise for noise, _ in drawn])
    assert abs(times.mean() - 0.6004) < 0.01 and times.min() >= 0.001 and times.max() <= 1
    assert abs(np.mean(times < 0.5) - ((0.5 - 0.001) / 0.999) ** 1.5) < 0.02  # the distribution of Beta(1.5, 1)
    assert abs(noise.mean()) < 0.02 and abs(noise.var() - 1) < 0.02


def test_published_configs_are_read_and_written_as_lerobot_does(tmp_path: Path) -> None:
    from lerobot.configs.policies import PreTrainedConfig

    base = Pi05Config(name="base")
    (tmp_path / "config.json").write_text(config_text(to_published(FAMILY, base), "BF16"))
    config = PreTrainedConfig.from_pretrained(tmp_path)
    assert (config.type, config.paligemma_variant, config.action_expert_variant) == ("pi05", "gemma_2b", "gemma_300m")
    assert (config.chunk_size, config.image_resolution, config.dtype) == (50, (224, 224), "bfloat16")
    config.save_pretrained(tmp_path)  # as lerobot writes it itself, its training settings included
    read = read_architecture(tmp_path, FAMILY)
    assert read.name == "base" and vars(read) == vars(base) | {"mtp_layers": 0}
    published = json.loads((tmp_path / "config.json").read_text()) | {"paligemma_variant": "gemma_9b"}
    (tmp_path / "config.json").write_text(json.dumps(published))
    with pytest.raises(Exception, match="paligemma_variant='gemma_9b'; gemma_2b, gemma_300m are known"):
        read_architecture(tmp_path, FAMILY)


def test_tensors_are_those_of_the_key_list() -> None:
    assert sum(np.prod(shape) for shape in weight_map(Pi05Config()).published.values()) == 4_143_404_816
    assert f"{VISION}encoder.layers.26.mlp.fc2.bias" in weight_map(Pi05Config()).published
