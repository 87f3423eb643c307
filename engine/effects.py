"""Settings that the user named and that would change nothing in this run: an error, never a silent shrug."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from engine.data.mixture import has_chats, has_demonstrations
from engine.schema import Run

ACTING = ("eval", "serve")  # jobs of a trained policy, which brings all that it needs
NOT_TRAINING = ("forward", "convert", "prepare", "sample", *ACTING)
KEPT = ("save_interval", "keep_last", "keep_best", "keep_every", "export_hf")
CHAT_KEYS = ("format", "chat_template", "train_on_prompt", "train_turns", "final_tool_calls")
SPLIT = ("datasets", "energon")
RECORDS = ("jsonl", "parquet", "datasets", "webdataset", "energon")  # sources whose samples have named parts


@dataclass(frozen=True)
class Rule:
    """Keys (or groups, ending in a dot) that do nothing in a run for which `when` holds."""

    keys: tuple[str, ...]
    when: Callable[[Run], bool]
    why: Callable[[Run], str]


RULES = (
    Rule(("sweep", "sweep."), lambda run: True, lambda run: "it is for sweeps, which --multirun begins"),
    Rule(
        ("optim.", "schedule.", *(f"checkpoint.{key}" for key in KEPT)),
        lambda run: run.job.name in NOT_TRAINING,
        lambda run: f"only job=train uses it, and this is job={run.job.name}",
    ),
    Rule(
        ("profile",),
        lambda run: run.job.name in NOT_TRAINING and run.profile.name != "false",
        lambda run: f"only job=train uses it, and this is job={run.job.name}",
    ),
    Rule(
        ("debug.", "faults.on_spike", "faults.spike_window", "faults.spike_threshold", "faults.max_skips"),
        lambda run: run.job.name in NOT_TRAINING,
        lambda run: f"only job=train uses it, and this is job={run.job.name}",
    ),
    Rule(
        ("eval", "eval."),
        lambda run: run.job.name != "eval",
        lambda run: f"only job=eval uses it, and this is job={run.job.name}",
    ),
    Rule(
        ("data", "data.", "task", "task."),
        lambda run: run.job.name in ACTING,
        lambda run: f"job={run.job.name} learns nothing, and a policy directory brings what it needs",
    ),
    Rule(
        ("seed",),
        lambda run: run.job.name in ACTING,
        lambda run: "job=serve draws with job.seed" if run.job.name == "serve" else "job=eval draws with eval.seed",
    ),
    Rule(("profile.steps",), lambda run: run.profile.name == "false", lambda run: "it needs profile=true"),
    Rule(("debug.steps",), lambda run: run.debug.dump is None, lambda run: "it needs debug.dump=layers"),
    Rule(
        ("faults.max_skips",),
        lambda run: run.job.name == "train" and run.faults.on_spike != "skip",
        lambda run: f"faults.on_spike={run.faults.on_spike} skips nothing",
    ),
    Rule(
        ("data.field",),
        lambda run: run.data.name not in (*RECORDS, "mixture"),
        lambda run: f"data={run.data.name} has no fields to choose from; data=jsonl has",
    ),
    Rule(
        ("data.field", "data.path", "data.split"),
        lambda run: run.data.name == "mixture",
        lambda run: "every source of data.mixture has its own",
    ),
    Rule(
        ("data.split",),
        lambda run: run.data.name not in (*SPLIT, "mixture"),
        lambda run: f"data={run.data.name} has no splits; data={' and data='.join(SPLIT)} have",
    ),
    Rule(
        ("data.mixture",),
        lambda run: run.data.name != "mixture",
        lambda run: f"this is data={run.data.name}, and only data=mixture reads it",
    ),
    Rule(
        ("data.workers",),
        lambda run: run.data.packing == "offline",
        lambda run: "data.packing=offline reads tokens that are there already",
    ),
    Rule(
        ("schedule.min_lr_ratio",),
        lambda run: run.schedule.name == "constant",
        lambda run: "schedule=constant never lowers the learning rate",
    ),
    Rule(
        ("model.sliding_window", "model.max_window_layers"),
        lambda run: getattr(run.model, "use_sliding_window", None) is False,
        lambda run: "it needs model.use_sliding_window=true",
    ),
    Rule(
        tuple(f"data.{key}" for key in CHAT_KEYS),
        lambda run: not has_chats(run.data),
        lambda run: f"it is for conversations, and this is data={run.data.name}; data=chat (or task=sft) reads them",
    ),
    Rule(
        ("data.cameras", "data.horizon", "data.conventions", "data.statistics"),
        lambda run: not has_demonstrations(run.data),
        lambda run: f"it is for demonstrations, and this is data={run.data.name}; data=lerobot reads them",
    ),
    Rule(
        ("data.seq_len", "data.vocab_size", "data.packing", "data.shuffle_rows"),
        lambda run: has_demonstrations(run.data),
        lambda run: "it is for rows of text, and this learns from demonstrations",
    ),
    Rule(
        ("data.train_turns",),
        lambda run: run.data.train_on_prompt,
        lambda run: "data.train_on_prompt=true learns all turns",
    ),
    Rule(
        ("job.merge",),
        lambda run: getattr(run.job, "to", None) == "sharded",
        lambda run: "job.to=sharded merges adapters anyway",
    ),
    Rule(
        ("task.lora.",),
        lambda run: run.task.name != "lora",
        lambda run: f"only task=lora has adapters, and this is task={run.task.name}",
    ),
    Rule(
        ("moe.", "parallelism.etp"),
        lambda run: not run.model.mixture(),
        lambda run: f"{run.family} {run.model.name} has no experts",
    ),
    Rule(
        ("indexer.stage",),
        lambda run: not hasattr(run.model, "follows"),
        lambda run: f"{run.family} {run.model.name} has no indexers",
    ),
    Rule(
        ("moe.bias_update_rate",),
        lambda run: run.model.mixture() and not run.model.mixture().bias,
        lambda run: f"the routers of {run.family} {run.model.name} have no correction bias",
    ),
    Rule(
        ("moe.bias_update_rate",),
        lambda run: run.model.mixture() and (run.task.name == "lora" or run.job.name in NOT_TRAINING),
        lambda run: "nothing moves the routers' correction bias in this run",
    ),
    Rule(
        ("moe.dispatcher", "moe.capacity_factor", "moe.drop", "moe.grouped"),
        lambda run: run.backend == "native" and run.model.mixture(),
        lambda run: "only backend=megatron has it",
    ),
    Rule(
        ("moe.drop",),
        lambda run: run.backend == "megatron" and run.moe.capacity_factor is None,
        lambda run: "it needs moe.capacity_factor; without one no expert is ever full",
    ),
    Rule(
        ("hardware.form_factor", "hardware.nics", "hardware.socket"),
        lambda run: run.hardware.name in ("cpu", "nvidia"),
        lambda run: f"only hardware=kunlun uses it, and this is hardware={run.hardware.name}",
    ),
    Rule(
        ("hardware.nics", "hardware.socket"),
        lambda run: run.hardware.name == "kunlun" and run.launcher.nodes == 1,
        lambda run: "one node needs no network; launcher.nodes says how many there are",
    ),
    Rule(
        ("optim.groups",),
        lambda run: run.backend == "megatron" or run.task.name == "lora",
        lambda run: "only backend=native has it" if run.backend == "megatron" else "task=lora trains adapters alone",
    ),
    Rule(
        ("optim.ema_decay",),
        lambda run: run.backend == "megatron" or run.task.name == "lora",
        lambda run: "only backend=native has it" if run.backend == "megatron" else "task=lora averages no adapters",
    ),
    Rule(
        ("optim.offload",),
        lambda run: run.backend == "native" or run.hardware.name == "cpu",
        lambda run: (
            "only backend=megatron has it" if run.backend == "native" else "hardware=cpu keeps it in host memory anyway"
        ),
    ),
    Rule(
        ("kernels.strict",),
        lambda run: run.backend != "native",
        lambda run: f"backend={run.backend} takes the hardware's kernels as they are; backend=native chooses",
    ),
    Rule(
        ("kernels.strict",),
        lambda run: run.backend == "native" and (run.job.name != "train" or run.precision.name != "bf16"),
        lambda run: "only job=train with precision=bf16 has kernels to choose",
    ),
    Rule(
        ("kernels.strict",),
        lambda run: run.backend == "native" and run.task.name == "lora",
        lambda run: "task=lora has no kernels to choose",
    ),
    Rule(
        ("logger.wandb_project",),
        lambda run: not run.logger.wandb,
        lambda run: "it needs logger.wandb=true",
    ),
    Rule(
        ("checkpoint.export_dtype", "job.sample_prompt", "job.sample_tokens"),
        lambda run: run.job.name == "train" and not run.checkpoint.export_hf,
        lambda run: "checkpoint.export_hf=false writes no model that could have it",
    ),
    Rule(
        ("job.top_k",),
        lambda run: getattr(run.job, "temperature", None) == 0,
        lambda run: "job.temperature=0 always takes the likeliest token",
    ),
)


def without_effect(run: Run, named: Collection[str]) -> Iterator[str]:
    """A line for each named setting that this run has no use for."""
    for rule in RULES:
        if rule.when(run):
            for key in named:
                if any(key == k or (k.endswith(".") and key.startswith(k)) for k in rule.keys):
                    yield f"{key} has no effect: {rule.why(run)}; leave it out"
