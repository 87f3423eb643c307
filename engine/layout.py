"""Layouts that cannot be: which model and which batch fit on which ranks. Reads a resolved run."""

from __future__ import annotations

from collections.abc import Iterator

from engine.data import SMALLEST_BPE
from engine.errors import UserError
from engine.schema import Run

NATIVE = "with backend=native only parallelism.dp can be more than 1; use backend=megatron, or fsdp to divide a model"


def check_layout(run: Run) -> None:
    """Raise a UserError that lists, one a line, why this layout cannot be."""
    problems = [*_backend(run), *_tensor(run), *_pipeline(run), *_sharding(run), *_launcher(run)]
    if run.job.name in ("train", "prepare"):
        problems += _rows(run)
    if run.job.name == "train":
        problems += _batch(run)
    if problems:
        raise UserError("\n".join(problems))


def divisors(number: int, limit: int = 64) -> str:
    """The divisors of a number, as words for a message."""
    found = [n for n in range(1, min(number, limit) + 1) if number % n == 0]
    return ", ".join(map(str, found))


def _backend(run: Run) -> Iterator[str]:
    layout = run.parallelism
    if run.backend == "native":
        for key in ("tp", "pp", "cp", "ep"):
            if getattr(layout, key) > 1:
                yield f"parallelism.{key}={getattr(layout, key)}: {NATIVE}"
        if layout.overlap:
            yield "parallelism.overlap=true: only backend=megatron has this switch; leave it out"
        return
    if layout.strategy in ("fsdp", "hsdp"):
        yield (
            f"parallelism.strategy={layout.strategy}: backend=megatron knows ddp and zero1 (distributed optimizer); "
            "add backend=native"
        )
    if layout.cp > 1:
        yield f"parallelism.cp={layout.cp}: context parallelism is not supported yet; it must be 1"
    if layout.ep > 1:
        yield f"parallelism.ep={layout.ep}: {run.family} has no experts to divide; it must be 1"
    if run.precision.compile:
        yield "precision.compile=true: only backend=native compiles; add backend=native or leave it out"


def _tensor(run: Run) -> Iterator[str]:
    tp, model = run.parallelism.tp, run.model
    if run.parallelism.sp and tp == 1:
        yield "parallelism.sp=true: sequence parallelism needs parallelism.tp of at least 2"
    for key in ("num_attention_heads", "intermediate_size"):
        number = getattr(model, key, None)
        if number and number % tp:
            yield f"parallelism.tp={tp} does not divide model.{key}={number}; tp can be {divisors(number)}"
    heads, groups = (getattr(model, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if heads and groups and heads % tp == 0 and groups % tp and tp % groups:
        yield (
            f"parallelism.tp={tp} and model.num_key_value_heads={groups}: one must divide the other; "
            f"tp can be {divisors(groups)} or a multiple of {groups}"
        )


def _pipeline(run: Run) -> Iterator[str]:
    pp, layers = run.parallelism.pp, getattr(run.model, "num_hidden_layers", None)
    if layers is None:
        return
    if pp > layers:
        yield f"parallelism.pp={pp}: more stages than model.num_hidden_layers={layers} layers; pp can be up to {layers}"
    elif layers % pp:
        yield f"parallelism.pp={pp} does not divide model.num_hidden_layers={layers}; pp can be {divisors(layers)}"


def _sharding(run: Run) -> Iterator[str]:
    layout = run.parallelism
    dp, size = layout.dp or 1, layout.shard_size
    if layout.strategy == "hsdp" and size is None:
        yield f"parallelism.strategy=hsdp needs parallelism.shard_size, a divisor of dp={dp}: {divisors(dp)}"
    elif layout.strategy == "hsdp" and size and dp % size:
        yield f"parallelism.shard_size={size} does not divide dp={dp}; it can be {divisors(dp)}"
    elif layout.strategy != "hsdp" and size is not None:
        yield f"parallelism.shard_size={size}: only parallelism.strategy=hsdp has it; leave it out"


def _launcher(run: Run) -> Iterator[str]:
    launcher = run.launcher
    if launcher.nodes == 1:
        if launcher.node_rank:
            yield f"launcher.node_rank={launcher.node_rank} with launcher.nodes=1; name the number of nodes"
        return
    if launcher.name == "local":
        yield f"launcher.nodes={launcher.nodes}: launcher=local has one; launcher=torchrun runs this node of several"
    if launcher.name == "torchrun":
        if launcher.node_rank is None:
            yield f"launcher.node_rank is missing; on each of the {launcher.nodes} nodes it is another number from 0"
        elif launcher.node_rank >= launcher.nodes:
            yield f"launcher.node_rank={launcher.node_rank} must be less than launcher.nodes={launcher.nodes}"
        if launcher.master_addr in ("127.0.0.1", "localhost"):
            yield "launcher.master_addr is missing; all nodes must name the address of node 0"


def _rows(run: Run) -> Iterator[str]:
    seq_len, most = run.data.seq_len, getattr(run.model, "max_position_embeddings", None)
    if most and seq_len > most:
        yield f"data.seq_len={seq_len} is more than model.max_position_embeddings={most}; it must not be"
    wanted, size = run.data.vocab_size, getattr(run.model, "vocab_size", None)
    if wanted and run.data.tokenizer is not None:
        yield f"data.vocab_size={wanted}: only a tokenizer trained here takes it, and there is {run.data.tokenizer}"
    if wanted and size and wanted > size:
        yield f"data.vocab_size={wanted} is more than model.vocab_size={size}; it must not be"
    elif wanted and wanted < SMALLEST_BPE and run.data.tokenizer is None:
        yield (
            f"data.vocab_size={wanted}: a byte-level BPE needs at least {SMALLEST_BPE} tokens; raise it (and "
            "model.vocab_size where that is smaller), or name a tokenizer with data.tokenizer=DIR"
        )


def _batch(run: Run) -> Iterator[str]:
    data, layout = run.data, run.parallelism
    dp = layout.dp or 1
    share = dp * data.micro_batch_size
    if data.global_batch_size % share:
        yield (
            f"data.global_batch_size={data.global_batch_size} must be a multiple of dp {dp} x data.micro_batch_size "
            f"{data.micro_batch_size} = {share}; {_batch_ways(data.global_batch_size, data.micro_batch_size, dp)}"
        )
    if layout.sp and data.seq_len % layout.tp:
        near = data.seq_len + layout.tp - data.seq_len % layout.tp
        yield f"data.seq_len={data.seq_len} must be a multiple of parallelism.tp={layout.tp} with sp; {near} is"


def _batch_ways(total: int, micro: int, dp: int) -> str:
    nearest = max(1, round(total / (dp * micro))) * dp * micro
    ways = [f"data.global_batch_size={nearest}"]
    if total % dp == 0:
        share = total // dp
        ways.append(f"data.micro_batch_size={max(n for n in range(1, min(share, micro) + 1) if share % n == 0)}")
    return f"set {' or '.join(ways)}"
