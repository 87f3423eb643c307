"""Layouts that cannot be: which model and which batch fit on which ranks. Reads a resolved run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine.data import SMALLEST_BPE
from engine.errors import UserError
from engine.resolve import model_ranks, obstacle_to_compiling, replica_unit
from engine.schema import Parallelism, Run
from engine.words import counted

NATIVE = "with backend=native only parallelism.dp can be more than 1; use backend=megatron, or fsdp to divide a model"


def check_layout(run: Run) -> None:
    """Raise a UserError that lists, one a line, why this layout cannot be."""
    problems = [
        *_backend(run),
        *_indexer(run),
        *_tensor(run),
        *_experts(run),
        *_pipeline(run),
        *_sharding(run),
        *_launcher(run),
    ]
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
        for key in ("tp", "pp", "vpp", "ep", "etp"):
            if getattr(layout, key) > 1:
                yield f"parallelism.{key}={getattr(layout, key)}: {NATIVE}"
        if layout.cp > 1:
            yield (
                f"parallelism.cp={layout.cp}: only backend=megatron divides rows over ranks, and this is "
                f"backend=native with strategy={layout.strategy}; add backend=megatron, or leave cp out"
            )
        if layout.overlap:
            yield "parallelism.overlap=true: only backend=megatron has this switch; leave it out"
        return
    if layout.strategy in ("fsdp", "hsdp"):
        yield (
            f"parallelism.strategy={layout.strategy}: backend=megatron knows ddp and zero1 (distributed optimizer); "
            "add backend=native"
        )
    if run.optim.offload and layout.strategy != "zero1":
        yield f"optim.offload=true needs parallelism.strategy=zero1, and this is {layout.strategy}"
    if run.precision.compile and (obstacle := obstacle_to_compiling(run)):
        yield f"precision.compile=true: backend=megatron compiles no layers {obstacle}; leave it out"


def _indexer(run: Run) -> Iterator[str]:
    loss, sparse = run.indexer.loss, hasattr(run.model, "follows")
    if loss and not sparse:
        yield f"indexer.loss={loss}: {run.family} {run.model.name} has no indexers; leave it out"
    elif loss and run.backend == "native":
        yield f"indexer.loss={loss}: backend=native leaves indexers as they are; add backend=megatron, or leave it out"
    elif loss and run.task.name == "lora":
        yield f"indexer.loss={loss}: task=lora trains adapters alone, and indexers have none; leave it out"
    if run.indexer.stage == "dense" and not loss:
        yield "indexer.stage=dense trains the indexers alone, and indexer.loss=0 leaves them as they are; set it to 1"


def _tensor(run: Run) -> Iterator[str]:
    tp, model = run.parallelism.tp, run.model
    if run.parallelism.sp and tp == 1:
        yield "parallelism.sp=true: sequence parallelism needs parallelism.tp of at least 2"
    for key in ("num_attention_heads", "intermediate_size"):
        # The first Qwen publishes the width of gate and up together.
        share = getattr(model, "WIDTHS", 1) if key == "intermediate_size" else 1
        number = (getattr(model, key, None) or 0) // share
        if number % tp:
            what = f"model.{key}={number}" if share == 1 else f"model.{key} / {share} = {number}"
            yield f"parallelism.tp={tp} does not divide {what}; tp can be {divisors(number)}"
    recurrent, ranks = getattr(model, "linear_num_key_heads", None), tp * run.parallelism.cp
    if recurrent and recurrent % ranks:
        yield (
            f"parallelism.tp={tp} x parallelism.cp={run.parallelism.cp} does not divide "
            f"model.linear_num_key_heads={recurrent}, and both divide these heads; together they can be "
            f"{divisors(recurrent)}"
        )
    heads, groups = (getattr(model, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if heads and groups and heads % tp == 0 and groups % tp and tp % groups:
        yield (
            f"parallelism.tp={tp} and model.num_key_value_heads={groups}: one must divide the other; "
            f"tp can be {divisors(groups)} or a multiple of {groups}"
        )
    elif heads and heads % tp == 0 and hasattr(model, "groups"):  # of each layer
        for own in sorted({model.groups(layer) for layer in range(model.num_hidden_layers)}):
            if own % tp and tp % own:
                yield (
                    f"parallelism.tp={tp}: some layers have {own} key/value heads; one must divide the other; "
                    f"tp can be {divisors(own)} or a multiple of {own}"
                )


def _experts(run: Run) -> Iterator[str]:
    layout, mixture = run.parallelism, run.model.mixture()
    if mixture is None:
        for key in ("ep", "etp"):
            if getattr(layout, key) > 1:
                size = f"{run.family} {run.model.name}"
                yield f"parallelism.{key}={getattr(layout, key)}: {size} has no experts to divide; it must be 1"
        return
    if run.backend == "native":
        return
    experts, width = mixture.experts, mixture.ffn_hidden_size
    ep, etp, ranks = layout.ep, layout.etp, layout.tp * layout.cp * (layout.dp or 1)
    if experts % ep:
        yield f"parallelism.ep={ep} does not divide the {experts} experts of a layer; ep can be {divisors(experts)}"
    if width % etp:
        yield f"parallelism.etp={etp} does not divide the width of an expert, {width}; etp can be {divisors(width)}"
    if not experts % ep and not width % etp and ranks % (ep * etp):
        yield (
            f"parallelism.ep={ep} x parallelism.etp={etp} must divide the {counted(ranks, 'rank')} of a pipeline stage "
            f"(tp {layout.tp} x cp {layout.cp} x dp {layout.dp or 1}); {_expert_ways(layout, experts, ranks)}"
        )
    if layout.tp > 1 and not layout.sp:
        yield f"parallelism.tp={layout.tp} with experts needs parallelism.sp=true: each rank routes its own tokens"


def _expert_ways(layout: Parallelism, experts: int, ranks: int) -> str:
    """The numbers of replicas next to this one that ep x etp fits, and the most of ep that fits these ranks."""
    unit, dp = replica_unit(layout), layout.dp or 1
    fit = [n for n in (dp // unit * unit, dp // unit * unit + unit) if n]
    ways = [f"parallelism.dp={n} ({counted(n * model_ranks(layout), 'rank')})" for n in fit]
    ep = max((n for n in range(1, layout.ep) if experts % n == 0 and ranks % (n * layout.etp) == 0), default=None)
    return f"set {' or '.join([*ways, *([f'parallelism.ep={ep}'] if ep else [])])}"


def _pipeline(run: Run) -> Iterator[str]:
    pp, vpp, layers = run.parallelism.pp, run.parallelism.vpp, getattr(run.model, "num_hidden_layers", None)
    if vpp > 1 and pp == 1 and run.backend == "megatron":
        yield f"parallelism.vpp={vpp}: virtual stages divide a pipeline's ranks; it needs parallelism.pp of at least 2"
    if layers is None:
        return
    yield from _leaders(run, layers, pp * vpp)
    if pp > layers:
        yield f"parallelism.pp={pp}: more stages than model.num_hidden_layers={layers}; pp can be up to {layers}"
    elif pp > 1 and vpp > 1 and layers % (pp * vpp):
        fits = f"vpp can be {divisors(layers // pp)}" if layers % pp == 0 else "without vpp pp need not divide them"
        yield (
            f"parallelism.pp={pp} x parallelism.vpp={vpp} = {pp * vpp} stages do not divide "
            f"model.num_hidden_layers={layers}; {fits}"
        )


def _leaders(run: Run, layers: int, stages: int) -> Iterator[str]:
    """A stage that begins with a layer that goes on with what the layer before it found out."""
    follows = run.model.follows() if hasattr(run.model, "follows") else ()
    if not any(follows) or stages > layers:
        return
    each, more = divmod(layers, stages)  # the first stages take one more, as engine.backends.megatron.config says
    wrong = [first for first in (stage * each + min(stage, more) for stage in range(stages)) if follows[first]]
    if wrong:
        yield (
            f"parallelism.pp={run.parallelism.pp}: a stage would begin with layer {wrong[0]}, which takes the keys "
            "that the layer before it chose; stages must begin with layers that have an indexer"
        )


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
    if data.global_batch_size % dp:
        near = data.global_batch_size + dp - data.global_batch_size % dp
        yield f"data.global_batch_size={data.global_batch_size} must be a multiple of dp {dp}; {near} is"
    elif data.global_batch_size % share:
        yield (
            f"data.global_batch_size={data.global_batch_size} must be a multiple of dp {dp} x data.micro_batch_size "
            f"{data.micro_batch_size} = {share}; {_batch_ways(data.global_batch_size, data.micro_batch_size, dp)}"
        )
    elif layout.vpp > 1 and data.global_batch_size // share < layout.pp:
        yield (
            f"parallelism.vpp={layout.vpp} needs a micro-batch for each of the pp {layout.pp} stages, and "
            f"data.global_batch_size={data.global_batch_size} makes {data.global_batch_size // share}; "
            f"set data.global_batch_size={layout.pp * share} or a smaller data.micro_batch_size"
        )
    yield from _tokens(data.seq_len, layout)


def _tokens(seq_len: int, layout: Parallelism) -> Iterator[str]:
    """Rows that cannot be cut into two chunks for each rank of cp, and those evenly over the ranks of tp."""
    tp = layout.tp if layout.sp else 1
    multiple = layout.cp * math.lcm(2, tp) if layout.cp > 1 else tp
    if seq_len % multiple:
        what = f"parallelism.tp={tp} with sp" if layout.cp == 1 else f"{multiple} with parallelism.cp={layout.cp}"
        what += f" and tp={tp} with sp" if layout.cp > 1 and tp > 1 else ""
        yield f"data.seq_len={seq_len} must be a multiple of {what}; {seq_len + multiple - seq_len % multiple} is"


def _batch_ways(total: int, micro: int, dp: int) -> str:
    nearest = max(1, round(total / (dp * micro))) * dp * micro
    ways = [f"data.global_batch_size={nearest}"]
    if total % dp == 0:
        share = total // dp
        ways.append(f"data.micro_batch_size={max(n for n in range(1, min(share, micro) + 1) if share % n == 0)}")
    return f"set {' or '.join(ways)}"
