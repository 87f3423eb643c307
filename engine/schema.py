"""The typed schema of a run: one dataclass for each config group. Free of torch, transformers and Hydra.

Hydra composes plain YAML into these classes (unknown keys and wrong types are errors), `engine.resolve` fills what is
`None` ("auto"), and the frozen result is all that a worker reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

SCHEMA_VERSION = 1


@dataclass
class Task:
    name: str = MISSING  # pretrain


@dataclass
class Data:
    name: str = MISSING  # stdlib | text | jsonl
    path: Optional[str] = None  # file, folder or glob; a comma-separated list of them
    field: str = "text"  # the JSONL key that holds the text
    held_out: float = 0.03  # share of the documents kept for validation
    tokenizer: Optional[str] = None  # directory; None trains a byte-level BPE on the corpus
    vocab_size: Optional[int] = None  # of the trained BPE; None: the model's vocab_size
    seq_len: int = 512
    global_batch_size: int = 16  # rows for each optimizer step, over all ranks
    micro_batch_size: Optional[int] = None  # rows for each forward pass of one rank; None: about 4096 tokens
    packing: str = "online"  # online | offline (a cache made by job=prepare, or on the spot)
    cache_dir: Optional[str] = None  # of job=prepare; None: <output_dir>/cache
    shuffle_rows: int = 512  # packed rows are shuffled within windows of this many
    max_bad_samples: int = 0
    prefetch: int = 4  # steps prepared ahead
    workers: int = 1  # tokenising threads for each rank
    inputs: Optional[str] = None  # job=forward: a safetensors batch


@dataclass
class Hardware:
    name: str = MISSING  # auto | cpu | nvidia
    strict: bool = False  # a config rewrite becomes an error


@dataclass
class Parallelism:
    name: str = MISSING
    tp: int = 1
    pp: int = 1
    vpp: int = 1  # virtual stages of each pipeline rank (interleaved 1F1B); needs pp > 1
    cp: int = 1
    ep: int = 1
    dp: Optional[int] = None  # None: what the world size leaves
    sp: bool = False  # Megatron sequence parallelism; needs tp > 1
    strategy: str = "ddp"  # native: ddp | zero1 | fsdp | hsdp. megatron: ddp | zero1 (the distributed optimizer)
    shard_size: Optional[int] = None  # hsdp: ranks that share one copy of the weights
    recompute: str = "none"  # none | selective | full
    overlap: bool = False  # overlap gradient reduction and parameter gathering with compute (megatron)


@dataclass
class Precision:
    name: str = MISSING  # fp32 | bf16
    compile: bool = False  # torch.compile on the native backend
    tf32: bool = True  # only for matmuls of fp32 runs on hardware that has it; job=forward turns it off


@dataclass
class Optim:
    name: str = MISSING  # adamw
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # not on norms and biases
    clip_grad: float = 1.0  # 0: no clipping


@dataclass
class Schedule:
    name: str = MISSING  # cosine | wsd | linear | constant
    steps: int = 100
    warmup_steps: int = 10
    decay_steps: Optional[int] = None  # wsd: None is a fifth of the steps
    min_lr_ratio: float = 0.1


@dataclass
class Checkpoint:
    name: str = MISSING
    save_interval: Optional[int] = None  # steps; None: only at the end
    keep_last: int = 2
    keep_best: bool = True  # by validation loss
    keep_every: Optional[int] = None  # keep those whose step divides by this, for good
    resume: Optional[str] = None  # auto, or a run folder, or one of its checkpoints
    export_hf: bool = True  # write hf/ at the end
    export_dtype: Optional[str] = None  # fp32 | bf16 | fp16; None: the dtype of model.weights, else of precision


@dataclass
class Logger:
    name: str = MISSING
    interval: int = 10  # steps between log lines; metrics.jsonl holds every step
    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "zooforge"
    progress: Optional[bool] = None  # None: a bar on a terminal, plain lines elsewhere


@dataclass
class Launcher:
    name: str = MISSING  # local | torchrun | print
    nodes: int = 1
    nproc_per_node: Optional[int] = None  # None: the devices here; on a CPU what the layout needs
    node_rank: Optional[int] = None
    master_addr: str = "127.0.0.1"
    master_port: Optional[int] = None


@dataclass
class TrainJob:
    name: str = "train"
    eval_interval: Optional[int] = None  # steps; None: a tenth of the run
    eval_rows: int = 384
    sample_prompt: str = "import "
    sample_tokens: int = 64


@dataclass
class ForwardJob:
    name: str = "forward"


@dataclass
class ConvertJob:
    name: str = "convert"
    to: str = "hf"  # hf | sharded
    out: Optional[str] = None  # None: inside the run folder
    source: Optional[str] = None  # the checkpoint or run folder to read for to=hf; model.weights for to=sharded


@dataclass
class PrepareJob:
    name: str = "prepare"


@dataclass
class SampleJob:
    name: str = "sample"
    max_new_tokens: int = 64
    temperature: float = 0.8  # 0: greedy
    top_k: int = 50


JOBS: dict[str, type] = {
    "train": TrainJob,
    "forward": ForwardJob,
    "convert": ConvertJob,
    "prepare": PrepareJob,
    "sample": SampleJob,
}


@dataclass
class Run:
    """A whole run. `model` is the family's own config class and `job` one of `JOBS`."""

    schema_version: int = SCHEMA_VERSION
    family: str = MISSING
    backend: str = "megatron"  # megatron | native
    run_id: Optional[str] = None  # None: a time stamp
    output_dir: str = "outputs"
    seed: int = 1234
    prompt: Optional[str] = None  # job=sample
    grad: bool = False  # job=forward
    model: Any = MISSING
    task: Task = field(default_factory=Task)
    data: Data = field(default_factory=Data)
    hardware: Hardware = field(default_factory=Hardware)
    parallelism: Parallelism = field(default_factory=Parallelism)
    precision: Precision = field(default_factory=Precision)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logger: Logger = field(default_factory=Logger)
    launcher: Launcher = field(default_factory=Launcher)
    job: Any = MISSING


@dataclass
class ModelConfig:
    """What every family's config class has besides its published keys."""

    name: str = MISSING  # the size, as its file in model/ is called
    weights: Optional[str] = None  # a Hugging Face directory, or a sharded checkpoint of ours: a warm start


MODEL_ONLY_KEYS = ("name", "weights")  # the keys above: never written to config.json
