"""Values that no run can have, whatever the layout: out of range, unknown, or asked of the wrong job."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from engine.effects import ACTING, without_effect
from engine.errors import UserError
from engine.family import Family, load_dotted
from engine.schema import Run
from engine.suggest import did_you_mean
from engine.tasks import task_problems
from engine.verbs import WIRE

COUNTS = {
    "data": (
        *("vocab_size", "seq_len", "global_batch_size", "micro_batch_size"),
        *("shuffle_rows", "prefetch", "workers"),
    ),
    "task": ("lora.r",),
    "parallelism": ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "shard_size"),
    "schedule": ("steps", "decay_steps"),
    "checkpoint": ("save_interval", "keep_last", "keep_every", "export_every"),
    "logger": ("interval",),
    "faults": ("spike_window", "max_skips"),
    "sweep": ("slots", "trials"),
    "launcher": ("nodes", "nproc_per_node"),
    "job": ("eval_interval", "eval_rows", "max_new_tokens"),
    "model": (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads"),
        *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"),
        *("shared_expert_intermediate_size", "kv_channels", "seq_length"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("n_routed_experts", "n_group", "topk_group"),
        *("depth", "num_heads", "num_kv_heads", "width", "mlp_dim", "expert_width", "expert_mlp_dim"),
        *("vision_width", "vision_mlp_dim", "vision_depth", "vision_heads", "patch_size", "image_size"),
        *("chunk_size", "max_action_dim", "max_state_dim", "num_inference_steps", "tokenizer_max_length"),
    ),
}
NOT_NEGATIVE = (
    "faults.read_retries",
    *(
        "seed",
        "sweep.seed",
        "data.max_bad_samples",
        "data.shuffle_documents",
        "optim.weight_decay",
        "optim.clip_grad",
        "schedule.warmup_steps",
    ),
    *("launcher.node_rank", "job.temperature", "job.top_k", "job.sample_tokens", "model.initializer_range"),
    *("model.router_aux_loss_coef", "moe.aux_loss", "moe.sequence_aux_loss", "moe.z_loss", "moe.bias_update_rate"),
    "indexer.loss",
    *("mtp.loss_weight", "model.mtp_layers"),
)
PATHS = (
    *("model.weights", "checkpoint.resume", "data.path", "data.tokenizer", "data.cache_dir", "data.inputs"),
    *("data.chat_template", "data.conventions", "task.lora.adapter", "job.source", "job.out"),
)
POSITIVE = (
    "faults.spike_threshold",
    "moe.capacity_factor",
    "faults.timeout_s",
    "task.lora.alpha",
    "optim.lr",
    "optim.eps",
    "model.rms_norm_eps",
    "model.rope_theta",
    *("model.layer_norm_epsilon", "model.rotary_emb_base"),
    *("model.time_sampling_beta_alpha", "model.time_sampling_beta_beta", "model.min_period", "model.max_period"),
)

MOST_PARTS = 100_000  # layers, or experts of one: tables of them are made


@dataclass(frozen=True)
class Range:
    """Keys whose value, where there is one, must pass `test`."""

    keys: tuple[str, ...]
    test: Callable[[Any], bool]
    words: str


RANGES = (
    Range(
        tuple(f"{group}.{key}" for group, keys in COUNTS.items() for key in keys),
        lambda v: 1 <= v < 2**63,
        "a whole number of at least 1 and less than 2**63",
    ),
    Range(
        ("model.num_hidden_layers", "model.num_experts", "model.n_routed_experts"),
        lambda v: v <= MOST_PARTS,
        f"at most {MOST_PARTS}, more than any model has",
    ),
    Range(NOT_NEGATIVE, lambda v: 0 <= v < math.inf, "0 or more"),
    Range(POSITIVE, lambda v: v > 0 and math.isfinite(v), "greater than 0 and finite"),
    Range(
        ("data.held_out", "task.lora.dropout", "optim.ema_decay"), lambda v: 0 <= v < 1, "at least 0 and less than 1"
    ),
    Range(("schedule.min_lr_ratio", "model.attention_dropout"), lambda v: 0 <= v <= 1, "from 0 to 1"),
    Range(("launcher.master_port",), lambda v: 1 <= v <= 65535, "a port from 1 to 65535"),
    Range(("profile.steps", "debug.steps"), lambda v: len(v) > 0 and min(v) >= 1, "steps, counted from 1"),
    Range(("seed",), lambda v: v < 2**63, "less than 2**63"),
    Range(
        ("optim.betas",), lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "two numbers, each at least 0 and < 1"
    ),
)

CHOICES = {
    "backend": ("megatron", "native"),
    "moe.dispatcher": ("alltoall", "allgather"),
    "moe.drop": ("probs", "position"),
    "indexer.stage": ("sparse", "dense"),
    "data.packing": ("online", "offline"),
    "data.statistics": ("policy", "dataset"),
    "data.format": ("alpaca", "sharegpt", "messages"),
    "data.train_turns": ("all", "last"),
    "parallelism.recompute": ("none", "selective", "full"),
    "parallelism.strategy": ("ddp", "zero1", "fsdp", "hsdp"),
    "debug.dump": ("layers",),
    "faults.on_spike": ("warn", "skip", "stop"),
    "checkpoint.export_dtype": ("fp32", "bf16", "fp16", "fp8"),
    "job.to": ("hf", "sharded"),
    "sweep.direction": ("minimize", "maximize"),
    "eval.record": ("failures", "all", "none"),
    "eval.gl": ("egl", "osmesa"),
}
MAX_RUN_ID = 128
FIRST_TRACED = 3  # where profile.steps does not say it: the steps before it start things up
RESERVED_IDS = ("latest", "sweeps")
RESERVED = " or ".join(RESERVED_IDS)


def check(run: Run, family: Family, named: Collection[str] = (), published: Path | None = None) -> None:
    """Raise a UserError that lists, one a line, all values that cannot be.

    `named` holds the keys that the user set: each of them must have an effect. `published` is the file that the model's
    keys were read from, if they were, so that its mistakes are not laid at the user's door.
    """
    problems = value_problems(run, family)
    problems += (
        [] if problems else [*_schedule(run), *_job(run, family), *task_problems(run), *without_effect(run, named)]
    )
    if published:
        problems = [_of_file(line, published) for line in problems]
    if problems:
        raise UserError("\n".join(problems))


def value_problems(run: Run, family: Family) -> list[str]:
    """Values that are wrong by themselves, one a line."""
    problems = [*_ranges(run), *_choices(run), *_names(run, family), *_model(run.model), *_packages(run)]
    if family.check and not any(line.startswith(("model.", "backend=")) for line in problems):
        problems += load_dotted(family.check)(run.model, run.backend)
    return problems


def _of_file(line: str, file: Path) -> str:
    """A problem of `model.key` as one of a config.json."""
    return f"{file}: {line.removeprefix('model.')}" if line.startswith("model.") else line


def value_at(run: Run, key: str) -> Any:
    """A dotted key's value; None where this run has no such key."""
    try:
        return attrgetter(key)(run)
    except AttributeError:
        return None


def _ranges(run: Run) -> Iterator[str]:
    for rule in RANGES:
        for key in rule.keys:
            value = value_at(run, key)
            # A comparison with NaN is false, so NaN never passes.
            if value is not None and not rule.test(value):
                yield f"{key}={_text(value)}: must be {rule.words}"


def _text(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, (list, tuple)) else str(value)


def _choices(run: Run) -> Iterator[str]:
    for key, choices in CHOICES.items():
        value = value_at(run, key)
        if value is not None and value not in choices:
            near = did_you_mean(value, choices)
            yield f"{key}={value}: there is no such choice{near}; {_only(choices)}"


def _only(choices: Sequence[str]) -> str:
    return f"the choices are {', '.join(choices)}" if len(choices) > 1 else f"{choices[0]} is the only one"


def _names(run: Run, family: Family) -> Iterator[str]:
    if run.backend == "megatron" and family.megatron is None:
        yield f"backend=megatron: {family.name} is not made of Megatron's parts; backend=native is the only one"
    if family.data and run.job.name in ("sample", "prepare"):
        yield f"job={run.job.name}: it is for text, and {family.name} does not learn from text; job=train does"
    if run.task.name not in family.tasks:
        yield f"task={run.task.name}: {family.name} has no such task; {_only(family.tasks)}"
    name = run.run_id
    if name is not None:
        plain = name.replace("-", "").replace("_", "").replace(".", "")
        if not plain.isalnum() or name.startswith(".") or not name.isascii() or name in RESERVED_IDS:
            yield f"run_id={name}: it names a folder; use letters, digits, '-', '_' and '.', and not {RESERVED}"
        elif len(name) > MAX_RUN_ID:
            yield f"run_id={name[:20]}...: {len(name)} characters; at most {MAX_RUN_ID} name a folder everywhere"
    if not run.output_dir.strip():
        yield "output_dir is empty; name a folder, such as outputs"
    for key in PATHS:
        value = value_at(run, key)
        if isinstance(value, str) and not value.strip():
            yield f"{key} is empty; name a path, or leave it out"


def _packages(run: Run) -> Iterator[str]:
    """Loggers that are asked for and not installed. What is only printed runs elsewhere."""
    if (run.logger.tensorboard or run.logger.wandb) and run.launcher.name != "print":
        from engine.metrics.writer import check_packages

        try:
            check_packages(run.logger)
        except UserError as error:
            yield str(error)


def _model(model: Any) -> Iterator[str]:
    heads, groups = (getattr(model, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if heads and groups and groups > 0 and heads % groups:
        yield f"model.num_attention_heads={heads} must be a multiple of model.num_key_value_heads={groups}"
    head_dim = getattr(model, "head_dim", None)
    if head_dim and head_dim % 2:
        yield f"model.head_dim={head_dim} must be even, since rotary embeddings turn pairs"
    size = getattr(model, "vocab_size", None)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(model, key, None)
        if token is not None and size is not None and not 0 <= token < size:
            yield f"model.{key}={token} is no token of model.vocab_size={size}; it must be from 0 to {size - 1}"


def _schedule(run: Run) -> Iterator[str]:
    schedule, steps = run.schedule, run.schedule.steps
    for key in ("profile.steps", "debug.steps") if run.job.name == "train" else ():
        if late := [step for step in value_at(run, key) or () if step > steps]:
            yield f"{key}={_text(value_at(run, key))}: step {late[0]} is after the last, schedule.steps={steps}"
    if run.job.name == "train" and run.profile.name == "true" and run.profile.steps is None and steps < FIRST_TRACED:
        yield (
            f"profile=true traces from step {FIRST_TRACED} on, and schedule.steps={steps}; "
            "profile.steps=[...] names the steps to trace"
        )
    if schedule.warmup_steps > steps:
        yield f"schedule.warmup_steps={schedule.warmup_steps} is more than schedule.steps={steps}; it must not be"
    if schedule.decay_steps is not None and schedule.name != "wsd":
        yield f"schedule.decay_steps={schedule.decay_steps}: only schedule=wsd has it, and this is {schedule.name}"
    elif schedule.decay_steps is not None and schedule.decay_steps + schedule.warmup_steps > steps:
        yield (
            f"schedule.warmup_steps={schedule.warmup_steps} and schedule.decay_steps={schedule.decay_steps} "
            f"are together more than schedule.steps={steps}; they must fit into it"
        )


def _job(run: Run, family: Family) -> Iterator[str]:
    job, weights = run.job.name, run.model.weights
    if run.prompt is not None and job != "sample":
        yield f"prompt: only job=sample takes one, and this is job={job}; add job=sample or leave prompt out"
    if run.grad and job != "forward":
        yield f"grad=true: only job=forward gives gradients, and this is job={job}; add job=forward or leave grad out"
    if run.data.inputs is not None and job != "forward":
        yield f"data.inputs: only job=forward takes a batch, and this is job={job}; add job=forward or leave it out"
    if run.checkpoint.resume is not None and job != "train":
        yield f"checkpoint.resume: only job=train resumes, and this is job={job}; model.weights takes a run's weights"
    if job == "forward":
        yield from _inputs(run.data.inputs)
    if job == "sample":
        if run.prompt is None:
            yield 'prompt is missing; job=sample continues one, for example prompt="import "'
        if weights is None:
            yield f"model.weights is missing; job=sample needs it, for example outputs/{run.family}/latest/hf"
    if job == "convert":
        yield from _convert(run)
    if job in ACTING:
        yield from _acting(run, family)


def _acting(run: Run, family: Family) -> Iterator[str]:
    """What only `eval` knows is asked by its dotted name: the engine imports nothing of the shelves above it."""
    if family.policy is None:
        yield f"job={run.job.name}: {family.name} is no family of policies; only those act"
    if run.model.weights is None:
        latest = f"outputs/{run.family}/latest/hf"
        yield f"model.weights is missing; job={run.job.name} needs a policy directory, for example {latest}"
    if missing := [package for package in WIRE if find_spec(package) is None]:
        yield f"job={run.job.name} needs {' and '.join(missing)}: install the extra `eval`"
    else:
        yield from load_dotted("eval.settings:job_problems")(run)
    if (run.launcher.nproc_per_node or 1) > 1 or run.launcher.nodes > 1 or (run.parallelism.dp or 1) > 1:
        more = "; eval.shard=0/4 divides an evaluation" if run.job.name == "eval" else ""
        yield f"job={run.job.name} runs one process, with parallelism=single{more}"


def _inputs(path: str | None) -> Iterator[str]:
    if path is None:
        yield "data.inputs is missing; job=forward needs a safetensors file with the model's inputs"
    elif not Path(path).expanduser().is_file():
        yield f"data.inputs={path}: no such file; it should be a safetensors file with the model's inputs"


def _convert(run: Run) -> Iterator[str]:
    source, weights = run.job.source, run.model.weights
    if run.job.to == "hf" and source is None:
        yield "job.source is missing; job=convert job.to=hf reads a run folder or one of its checkpoints there"
    if run.job.to == "hf" and weights is not None:
        yield "model.weights: job=convert job.to=hf reads job.source instead; leave it out"
    if run.job.to == "sharded" and weights is None:
        yield "model.weights is missing; job=convert job.to=sharded reads a Hugging Face directory there"
    if run.job.to == "sharded" and source is not None:
        yield "job.source: job=convert job.to=sharded reads model.weights instead; leave it out"
