"""The typed schema of a run: one dataclass for each config group. Free of torch, transformers and Hydra.

Hydra composes plain YAML into these classes (unknown keys and wrong types are errors), `engine.resolve` fills what is
`None` ("auto"), and the frozen result is all that a worker reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Optional

from omegaconf import MISSING

from engine.judging import EvalJob, Evaluation, ServeJob
from engine.moe.mixture import Mixture

SCHEMA_VERSION = 1


@dataclass
class Lora:
    r: int = 16  # rank of the adapters
    alpha: float = 32.0  # adapters are scaled by alpha / r
    dropout: float = 0.0  # of what the adapters read
    targets: Optional[list[str]] = None  # last names of published linear layers (q_proj); None: the family's
    adapter: Optional[str] = None  # an adapter directory (PEFT's format) to go on from; it knows its base weights


@dataclass
class Task:
    name: str = MISSING  # pretrain | midtrain | sft | lora
    lora: Lora = field(default_factory=Lora)


@dataclass
class Data:
    name: str = MISSING  # stdlib | text | jsonl | chat | parquet | datasets | webdataset | energon | lerobot | mixture
    path: Optional[str] = None  # file, folder or glob; a comma-separated list of them
    field: str = "text"  # what holds the text: JSON key, column, or part of a shard's samples (txt, json:key)
    split: str = "train"  # of datasets folders and Energon datasets that have several
    mixture: Optional[list[Any]] = None  # data=mixture: [{name: a, kind: text, path: DIR, weight: 3}, ...]
    validation: Optional[list[Any]] = None  # named held-out sets: [{name: a, kind: jsonl, path: FILE}, ...]
    shuffle_documents: Optional[int] = None  # shuffled within windows of this many; 0: in order; None: all at once
    held_out: float = 0.03  # share of the documents kept for validation
    tokenizer: Optional[str] = None  # directory; None trains a byte-level BPE on the corpus
    vocab_size: Optional[int] = None  # of the trained BPE; None: the model's vocab_size
    seq_len: int = 512  # tokens of a row
    global_batch_size: int = 16  # rows for each optimizer step, over all ranks
    micro_batch_size: Optional[int] = None  # rows for each forward pass of one rank; None: about 4096 tokens
    packing: str = "online"  # online | offline (a cache made by job=prepare, or on the spot)
    cache_dir: Optional[str] = None  # of job=prepare; None: <output_dir>/cache
    shuffle_rows: int = 512  # packed rows are shuffled within windows of this many
    max_bad_samples: int = 0  # samples that cannot be read and are skipped; one more ends the run
    prefetch: int = 4  # steps prepared ahead
    workers: int = 1  # tokenising threads for each rank
    inputs: Optional[str] = None  # job=forward: a safetensors batch
    format: Optional[str] = None  # of chats: alpaca | sharegpt | messages; None: each file says it itself
    chat_template: Optional[str] = None  # a Jinja file; None: the tokenizer's own
    train_on_prompt: bool = False  # learn whole conversations, not assistant turns alone
    train_turns: str = "all"  # all | last: the assistant turns of a conversation that are learned
    final_tool_calls: bool = False  # a conversation may end with a tool call that has no result
    cameras: Optional[list[Any]] = None  # lerobot: the cameras to read; None: all
    horizon: Optional[int] = None  # lerobot: actions of a chunk; None: the model's
    statistics: Optional[str] = None  # policy | dataset: what to normalise with; None: a policy's own, if both agree
    conventions: Optional[str] = None  # lerobot: folder of a conventions.json; None: that of the dataset, if it has one


@dataclass
class Hardware:
    name: str = MISSING  # auto | nvidia | kunlun | cpu, or a plugin of another package
    strict: bool = False  # a setting that this hardware would change becomes an error
    form_factor: Optional[str] = None  # kunlun: oam | pcie; None: what the driver's tool says
    nics: Optional[str] = None  # kunlun, several nodes: a network interface for each card, comma-separated
    socket: Optional[str] = None  # kunlun, several nodes: the interface that nodes find each other through
    rewrites: Optional[list[Any]] = None  # what the hardware changed, as a run writes it down; cannot be set


@dataclass
class Kernels:
    strict: bool = False  # an operation without its best kernel here becomes an error, not a fallback (native)


@dataclass
class Parallelism:
    name: str = MISSING
    tp: int = 1  # ranks that share each matrix (tensor parallel)
    pp: int = 1  # stages of layers (pipeline parallel)
    vpp: int = 1  # virtual stages of each pipeline rank (interleaved 1F1B); needs pp > 1
    cp: int = 1  # ranks that share each row (context parallel)
    ep: int = 1  # ranks that share the experts (expert parallel)
    etp: int = 1  # ranks that share each expert's matrices (expert tensor parallel)
    dp: Optional[int] = None  # None: what the world size leaves
    sp: bool = False  # Megatron sequence parallelism; needs tp > 1
    strategy: str = "ddp"  # native: ddp | zero1 | fsdp | hsdp. megatron: ddp | zero1 (the distributed optimizer)
    shard_size: Optional[int] = None  # hsdp: ranks that share one copy of the weights
    recompute: str = "none"  # none | selective | full
    overlap: bool = False  # overlap gradient reduction and parameter gathering with compute (megatron)


@dataclass
class MoE:
    """Experts: how tokens reach them and what keeps them evenly loaded."""

    dispatcher: str = "alltoall"  # alltoall | allgather (megatron)
    capacity_factor: Optional[float] = None  # an expert takes so many times its even share; None: all (dropless)
    drop: str = "probs"  # what a full expert turns away first: probs (the least likely) | position (the last)
    aux_loss: Optional[float] = None  # weight of the balancing loss; None: the model's router_aux_loss_coef
    sequence_aux_loss: float = 0.0  # weight of the balancing loss of each row by itself
    z_loss: float = 0.0  # weight of the loss that keeps router logits small
    bias_update_rate: float = 0.001  # how far a step moves the correction bias, where the router has one; 0: not at all
    grouped: Optional[bool] = None  # one matrix product for all experts; None: where the hardware has it (megatron)


@dataclass
class MTP:
    """Multi-token prediction: layers that each predict one token further ahead."""

    loss_weight: Optional[float] = None  # of their loss (megatron); 0: kept as they are; None: 0.1 where there are some


@dataclass
class Precision:
    name: str = MISSING  # fp32 | bf16
    compile: Optional[bool] = None  # torch.compile on the native backend; None: in bf16 where the hardware compiles
    tf32: bool = True  # only for matmuls of fp32 runs on hardware that has it; job=forward turns it off


@dataclass
class Optim:
    name: str = MISSING  # adamw
    lr: float = 1e-3  # highest learning rate
    betas: tuple[float, float] = (0.9, 0.95)  # decay of the two moments
    eps: float = 1e-8  # added to the square root of the second moment
    weight_decay: float = 0.1  # not on norms and biases
    clip_grad: float = 1.0  # 0: no clipping
    groups: Optional[list[Any]] = None  # [{path: "*embed*", lr_scale: 0.1, weight_decay: 0}, {path: ..., frozen: true}]
    ema_decay: Optional[float] = None  # average the weights over the steps with this decay, for exports (native)
    offload: bool = False  # keep and update the optimizer's state in host memory (megatron)


@dataclass
class Schedule:
    name: str = MISSING  # cosine | wsd | linear | constant
    steps: int = 100  # optimizer steps of the whole run
    warmup_steps: int = 10  # the learning rate rises linearly over these
    decay_steps: Optional[int] = None  # wsd: None is a fifth of the steps
    min_lr_ratio: float = 0.1  # the last learning rate, as a share of optim.lr


@dataclass
class Checkpoint:
    name: str = MISSING
    save_interval: Optional[int] = None  # steps between saves; None: a tenth of the run, 50 at least
    keep_last: int = 2  # newest checkpoints kept
    keep_best: bool = True  # by validation loss
    keep_every: Optional[int] = None  # keep those whose step divides by this, for good
    async_save: bool = True  # write while training goes on; steps wait for a copy in host memory only
    resume: Optional[str] = None  # auto, or a run folder, or one of its checkpoints
    export_every: Optional[int] = None  # write hf_steps/step_* at every Nth save
    export_hf: bool = True  # write hf/ at the end
    export_dtype: Optional[str] = None  # fp32 | bf16 | fp16 | fp8 (as published); None: that of model.weights


@dataclass
class Logger:
    name: str = MISSING
    interval: int = 10  # steps between log lines; metrics.jsonl holds every step
    tensorboard: bool = False  # also write TensorBoard events
    wandb: bool = False  # also log to Weights & Biases
    wandb_project: str = "zooforge"  # where logger.wandb logs to
    progress: Optional[bool] = None  # None: a bar on a terminal, plain lines elsewhere


@dataclass
class Faults:
    timeout_s: float = 1800.0  # a rank that makes no progress for so long ends the run, with the stacks of all ranks
    on_spike: str = "warn"  # warn | skip | stop: what to do at a loss far above the recent ones
    spike_window: int = 64  # steps that tell what is usual
    spike_threshold: float = 8.0  # robust standard deviations above their median
    max_skips: int = 10  # so many skipped steps in a row end the run
    read_retries: int = 4  # of a file read that failed, with growing pauses from a quarter of a second on


@dataclass
class Profile:
    name: str = "false"  # true: trace some steps with torch's profiler
    steps: Optional[list[int]] = None  # which; None: the third to fifth that the command takes


@dataclass
class Debug:
    dump: Optional[str] = None  # layers: statistics of what every layer puts out, in layers.jsonl
    steps: Optional[list[int]] = None  # of which steps; None: all


@dataclass
class Launcher:
    name: str = MISSING  # local | torchrun | print
    nodes: int = 1  # machines
    nproc_per_node: Optional[int] = None  # None: the devices here; on a CPU what the layout needs
    node_rank: Optional[int] = None  # the number of this machine, from 0
    master_addr: str = "127.0.0.1"  # of node 0
    master_port: Optional[int] = None  # of node 0; None: 29500 over several nodes


@dataclass
class Sweep:
    """What --multirun does. Runs themselves never see it."""

    name: str = "grid"  # grid: every combination | optuna: a search by Optuna's TPE
    slots: Optional[int] = None  # runs at a time; None: as many as the accelerators hold, 1 on a CPU
    metric: str = "val_loss"  # the number in result.json or metrics.jsonl that says which run is best
    direction: str = "minimize"  # minimize | maximize
    trials: int = 20  # optuna: runs of the study, those of a resumed one included
    seed: int = 1234  # optuna: of the values that are tried
    resume: Optional[str] = None  # optuna: the id or folder of a study to go on with


@dataclass
class TrainJob:
    name: str = "train"
    eval_interval: Optional[int] = None  # steps; None: a tenth of the run
    eval_rows: int = 384  # held-out rows of each validation
    sample_prompt: str = "import "  # what the text sample at the end begins with
    sample_tokens: int = 64  # its length


@dataclass
class ForwardJob:
    name: str = "forward"


@dataclass
class ConvertJob:
    name: str = "convert"
    to: str = "hf"  # hf | sharded
    out: Optional[str] = None  # None: inside the run folder
    source: Optional[str] = None  # the checkpoint or run folder to read for to=hf; model.weights for to=sharded
    merge: bool = False  # to=hf: the source is an adapter; write its base with the adapter added


@dataclass
class PrepareJob:
    name: str = "prepare"


@dataclass
class SampleJob:
    name: str = "sample"
    max_new_tokens: int = 64  # length of the continuation
    temperature: float = 0.8  # 0: greedy
    top_k: int = 50  # drawn from the k likeliest tokens


JOBS: dict[str, type] = {
    "train": TrainJob,
    "forward": ForwardJob,
    "convert": ConvertJob,
    "prepare": PrepareJob,
    "sample": SampleJob,
    "eval": EvalJob,
    "serve": ServeJob,
}


@dataclass
class Indexer:
    """How the indexers of sparse attention learn (DeepSeek-V3.2, section 2.1.1)."""

    loss: float = 0.0  # weight of the loss that brings an indexer's scores to attention's; 0: indexers stay as they are
    stage: str = "sparse"  # sparse | dense (warm-up: attention sees all keys, and only the indexers are trained)


@dataclass
class Run:
    """A whole run. `model` is the family's own config class and `job` one of `JOBS`."""

    schema_version: int = SCHEMA_VERSION
    family: str = MISSING
    backend: str = "megatron"  # megatron | native
    run_id: Optional[str] = None  # None: a time stamp
    output_dir: str = "outputs"  # run folders are OUTPUT_DIR/FAMILY/RUN_ID
    seed: int = 1234  # of initial weights, of the order of the data, of sampling
    prompt: Optional[str] = None  # job=sample: the text to continue
    grad: bool = False  # job=forward: also the gradient of every parameter
    model: Any = MISSING
    task: Task = field(default_factory=Task)
    data: Data = field(default_factory=Data)
    hardware: Hardware = field(default_factory=Hardware)
    kernels: Kernels = field(default_factory=Kernels)
    parallelism: Parallelism = field(default_factory=Parallelism)
    moe: MoE = field(default_factory=MoE)
    indexer: Indexer = field(default_factory=Indexer)
    mtp: MTP = field(default_factory=MTP)
    precision: Precision = field(default_factory=Precision)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logger: Logger = field(default_factory=Logger)
    launcher: Launcher = field(default_factory=Launcher)
    faults: Faults = field(default_factory=Faults)
    profile: Profile = field(default_factory=Profile)
    debug: Debug = field(default_factory=Debug)
    sweep: Sweep = field(default_factory=Sweep)
    eval: Evaluation = field(default_factory=lambda: Evaluation(name="libero"))  # job=eval
    job: Any = MISSING


@dataclass
class ModelConfig:
    """What every family's config class has besides its published keys."""

    MTP_HIDDEN_FIRST: ClassVar[bool] = False  # in the projection of layers for multi-token prediction

    name: str = MISSING  # the size, as its file in model/ is called
    weights: Optional[str] = None  # a Hugging Face directory, or a sharded checkpoint of ours: a warm start
    model_type: Optional[str] = None  # which of the family's architectures, where it has several; the size says it
    mtp_layers: Optional[int] = None  # layers for multi-token prediction; None: those of the weights, or as published

    def published_mtp_layers(self) -> int:
        """The layers for multi-token prediction that a model of this size is published with."""
        return getattr(self, "num_nextn_predict_layers", None) or 0

    def predictor_layer(self) -> int:
        """The layer of the decoder that layers for multi-token prediction are like; negative: from the end."""
        return -1

    def mixture(self) -> Optional[Mixture]:
        """The model's experts; None if it is dense."""
        return None

    def reference_keys(self) -> dict[str, Any]:
        """The keys of the reference's config class: the published ones, where a family does not say otherwise."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in MODEL_ONLY_KEYS}


MODEL_ONLY_KEYS = ("name", "weights", "model_type", "mtp_layers")  # the keys above: never written to config.json
