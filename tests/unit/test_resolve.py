"""What is left open is decided, and what cannot be is refused with the reason."""

from __future__ import annotations

import dataclasses

import pytest

from engine.cli import prepare
from engine.compose import compose
from engine.errors import UserError
from engine.family import load_family
from engine.plan import plan
from engine.resolve import resolve

QWEN3 = load_family("qwen3")


# What the messages below count on, whatever the recipe says.
ROWS = ("data.global_batch_size=16", "data.micro_batch_size=4", "data.seq_len=256")


def resolved(*overrides, devices=0):
    return resolve(compose(QWEN3, list(overrides)).run, devices)


# overrides, accelerators of a node -> ranks of a node, replicas.
RANKS = [
    ("", 0, 1, 1),
    ("", 8, 1, 1),  # single is one process also where there are more devices
    ("parallelism=dp2", 0, 2, 2),
    ("parallelism=ddp", 0, 1, 1),
    ("parallelism=ddp", 8, 8, 8),
    ("parallelism=fsdp", 4, 4, 4),
    ("parallelism=fsdp", 0, 1, 1),
    ("parallelism=hsdp", 0, 4, 4),  # two groups of two: the least that shows both divisions
    ("parallelism=hsdp parallelism.shard_size=3", 0, 6, 6),
    ("parallelism=hsdp", 8, 8, 8),
    ("parallelism=tp2", 0, 2, 1),
    ("parallelism=tp2", 8, 8, 4),
    ("parallelism=tp2_pp2", 0, 4, 1),
    ("parallelism=cp2", 0, 2, 1),
    ("parallelism=cp2_tp2", 8, 8, 2),
    ("parallelism=pp2_vpp2", 0, 2, 1),  # virtual stages need no ranks
    ("parallelism=tp2_pp2 parallelism.dp=2", 0, 8, 2),
    ("parallelism=tp2_pp2 launcher.nproc_per_node=8", 0, 8, 2),
    ("parallelism=tp4_pp2", 8, 8, 1),
    ("parallelism=tp4_pp2 launcher=print", 0, 8, 1),
    ("parallelism=tp4_pp2 launcher=print", 2, 8, 1),  # what is only printed needs no devices here
    ("parallelism=tp4_pp2 launcher=print", 16, 16, 2),
    ("parallelism=tp8_pp4 launcher=print launcher.nodes=4", 0, 8, 1),
    ("parallelism=tp8_pp4 launcher=torchrun launcher.nodes=4", 8, 8, 1),
    ("parallelism=tp2 launcher=torchrun launcher.nodes=3", 0, 2, 3),
    ("parallelism.tp=2 parallelism.dp=null", 0, 2, 1),
    ("parallelism.tp=2", 0, 2, 1),
]


@pytest.mark.parametrize(("overrides", "devices", "nproc", "dp"), RANKS)
def test_ranks_and_replicas(overrides, devices, nproc, dp):
    run = resolved(*overrides.split(), devices=devices)
    assert (run.launcher.nproc_per_node, run.parallelism.dp) == (nproc, dp)


WORLDS = [
    (
        "parallelism=dp2 launcher.nproc_per_node=3",
        0,
        ["needs 2 ranks", "gives 3", "nproc_per_node=2", "parallelism.dp=3"],
    ),
    ("parallelism=tp2 launcher.nproc_per_node=3", 0, ["multiple of 2 ranks", "gives 3", "launcher.nproc_per_node=2"]),
    ("parallelism=tp2", 3, ["multiple of 2", "3 devices"]),
    ("parallelism=tp2_pp2 parallelism.dp=1", 2, ["needs 4 devices", "has 2"]),
    ("parallelism=dp2 launcher=torchrun launcher.nodes=4", 0, ["launcher.nodes=4", "2 ranks"]),
]


@pytest.mark.parametrize(("overrides", "devices", "words"), WORLDS)
def test_ranks_that_do_not_add_up(overrides, devices, words):
    with pytest.raises(UserError) as error:
        resolved(*overrides.split(), devices=devices)
    assert [w for w in words if w not in str(error.value)] == [] and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rows", "seq_len", "dp", "micro"),
    [
        (16, 256, 1, 16),
        (16, 512, 1, 8),
        (12, 512, 2, 6),
        (15, 512, 1, 5),
        (8, 4096, 1, 1),
        (8, 9000, 4, 1),
        (7, 128, 7, 1),
    ],
)
def test_micro_batches_divide_the_share_and_hold_4096_tokens_at_most(rows, seq_len, dp, micro):
    run = resolved(f"data.global_batch_size={rows}", f"data.seq_len={seq_len}", f"parallelism.dp={dp}")
    assert run.data.micro_batch_size == micro


@pytest.mark.parametrize(
    ("layout", "seq_len", "micro"),
    [("cp2", 4096, 2), ("cp2", 512, 16), ("pp2_vpp2", 128, 8), ("pp2_vpp2", 512, 8), ("pp2_vpp2", 4096, 1)],
)
def test_micro_batches_of_divided_rows_and_interleaved_pipelines(layout, seq_len, micro):
    """A rank of cp2 holds half of every row; two pipeline ranks need two micro-batches of the 16 rows."""
    run = resolved(f"parallelism={layout}", "data.global_batch_size=16", f"data.seq_len={seq_len}")
    assert run.data.micro_batch_size == micro


def test_open_values_are_filled():
    run = resolved("schedule=wsd", "schedule.steps=70", "output_dir=out")
    assert run.schedule.decay_steps == 14 and run.job.eval_interval == 7 and run.checkpoint.save_interval == 50
    assert (run.data.vocab_size, run.data.cache_dir, run.checkpoint.export_dtype) == (4096, "out/cache", "fp32")
    assert run.run_id == "run"
    assert resolved("run_id=mine").run_id == "mine"
    assert resolved("schedule.steps=3").job.eval_interval == 1
    assert resolved("schedule.steps=3").checkpoint.save_interval == 3
    assert resolved("schedule.steps=640").checkpoint.save_interval == 64
    assert resolved("schedule=wsd", "schedule.steps=4", "schedule.warmup_steps=3").schedule.decay_steps == 1
    assert resolved("precision=bf16").checkpoint.export_dtype == "bf16"


def test_values_of_the_user_stay():
    run = resolved(
        "schedule=wsd",
        "schedule.decay_steps=3",
        "job.eval_interval=9",
        "checkpoint.save_interval=4",
        "data.vocab_size=300",
    )
    assert (run.schedule.decay_steps, run.job.eval_interval, run.checkpoint.save_interval) == (3, 9, 4)
    assert run.data.vocab_size == 300


def test_pure():
    run = compose(QWEN3, ["parallelism=tp2"]).run
    before = dataclasses.asdict(run)
    assert resolve(run, 8) == resolve(run, 8)
    assert dataclasses.asdict(run) == before


# overrides -> words of the only line of error.
BAD = [
    ("schedule.steps=0", ["schedule.steps=0", "at least 1"]),
    ("schedule.warmup_steps=-1", ["schedule.warmup_steps=-1", "0 or more"]),
    ("schedule.steps=200 schedule.warmup_steps=300", ["schedule.warmup_steps=300", "schedule.steps=200"]),
    ("schedule=wsd schedule.steps=200 schedule.decay_steps=190", ["schedule.decay_steps=190", "schedule.steps=200"]),
    ("schedule.decay_steps=10", ["schedule.decay_steps=10", "schedule=wsd"]),
    ("data.held_out=1", ["data.held_out=1", "less than 1"]),
    ("data.held_out=-0.1", ["data.held_out=-0.1"]),
    ("optim.lr=0", ["optim.lr=0", "greater than 0"]),
    ("optim.lr=.nan", ["optim.lr=.nan", "number"]),
    ("optim.lr=nan", ["optim.lr=nan", "greater than 0"]),
    ("optim.lr=inf", ["optim.lr=inf", "finite"]),
    ("optim.weight_decay=-1", ["optim.weight_decay=-1"]),
    ("optim.betas=[0.9]", ["optim.betas=[0.9]", "two numbers"]),
    ("optim.betas=[0.9,1.0]", ["optim.betas=[0.9,1.0]"]),
    ("schedule.min_lr_ratio=1.5", ["schedule.min_lr_ratio=1.5", "from 0 to 1"]),
    ("data.micro_batch_size=0", ["data.micro_batch_size=0"]),
    ("data.seq_len=-5", ["data.seq_len=-5"]),
    ("data.vocab_size=0", ["data.vocab_size=0"]),
    ("checkpoint.keep_last=0", ["checkpoint.keep_last=0"]),
    ("checkpoint.export_dtype=fp4", ["checkpoint.export_dtype=fp4", "fp16"]),
    ("seed=-1", ["seed=-1"]),
    ("backend=megatro", ["backend=megatro", "did you mean megatron"]),
    ("data.packing=of", ["data.packing=of", "offline"]),
    ("parallelism.recompute=all", ["parallelism.recompute=all", "selective"]),
    ("parallelism.strategy=zero3", ["parallelism.strategy=zero3", "zero1"]),
    ("launcher.master_port=70000", ["launcher.master_port=70000", "65535"]),
    ("model.num_hidden_layers=0", ["model.num_hidden_layers=0"]),
    ("model.num_hidden_layers=1000000000000", ["at most 100000, more than any model has"]),
    ("model=tiny_moe model.num_experts=1000000000000", ["model.num_experts=1000000000000", "at most 100000"]),
    ("model.num_attention_heads=5", ["num_attention_heads=5", "num_key_value_heads=2"]),
    ("model.head_dim=7", ["model.head_dim=7", "even"]),
    # what no backend has, or one of them
    ("model.hidden_act=gelu", ["model.hidden_act=gelu", "backend=native has it"]),
    ("backend=native model.hidden_act=sillu", ["hidden_act=sillu", "did you mean silu"]),
    ("model.attention_dropout=0.1", ["attention_dropout=0.1", "must be 0"]),
    ("backend=native model.attention_dropout=0.1", ["attention_dropout=0.1", "must be 0"]),
    ("model.rope_scaling={rope_type:dynamic,factor:2}", ["dynamic", "backend=native has it"]),
    ("backend=native model.rope_scaling={rope_type:yarm,factor:2}", ["yarm", "did you mean yarn"]),
    ("model.rope_scaling={rope_type:yarn,factor:2}", ["yarn", "needs original_max_position_embeddings"]),
    ("model.rope_scaling={rope_type:linear,factor:x}", ["factor=x", "greater than 0"]),
    ("model.rope_scaling={rope_type:linear,factor:2,beta:3}", ["linear", "has no beta"]),
    ("model.use_sliding_window=true", ["model.sliding_window"]),
    ("model.use_sliding_window=true model.sliding_window=0", ["model.sliding_window=0", "at least 1"]),
    ("model.bos_token_id=4096", ["bos_token_id=4096", "vocab_size=4096", "4095"]),
    ("model.eos_token_id=-1", ["eos_token_id=-1"]),
    ("logger.wandb=true", ["logger.wandb=true", "not installed"]),
    # what would have no effect
    ("data.field=x", ["data.field has no effect", "data=stdlib"]),
    ("data.packing=offline data.workers=2", ["data.workers has no effect"]),
    ("model.sliding_window=8", ["model.sliding_window has no effect", "use_sliding_window=true"]),
    ("job=prepare profile=true", ["profile has no effect", "only job=train", "job=prepare"]),
    ("kernels.strict=true", ["kernels.strict has no effect", "backend=native chooses"]),
    ("backend=native kernels.strict=true", ["kernels.strict has no effect", "precision=bf16"]),
    ("job=prepare debug.dump=layers", ["debug.dump has no effect", "only job=train"]),
    ("profile.steps=[3]", ["profile.steps has no effect", "needs profile=true"]),
    ("debug.steps=[3]", ["debug.steps has no effect", "debug.dump=layers"]),
    ("faults.max_skips=3", ["faults.max_skips has no effect", "faults.on_spike=warn skips nothing"]),
    ("faults.on_spike=pause", ["faults.on_spike=pause", "warn, skip, stop"]),
    ("faults.timeout_s=0", ["faults.timeout_s=0", "greater than 0"]),
    ("profile=true profile.steps=[0]", ["profile.steps=[0]", "counted from 1"]),
    ("profile=true schedule.steps=9 profile.steps=[9,10]", ["profile.steps=[9,10]", "step 10", "schedule.steps=9"]),
    ("debug.dump=layers schedule.steps=9 debug.steps=[12]", ["debug.steps=[12]", "step 12", "schedule.steps=9"]),
    ("profile=true schedule.steps=2", ["from step 3", "schedule.steps=2", "profile.steps=[...]"]),
    ("debug.dump=layer", ["debug.dump=layer", "did you mean layers?", "layers is the only one"]),
    ("schedule=constant schedule.min_lr_ratio=0.5", ["min_lr_ratio has no effect", "constant"]),
    ("job=prepare optim.lr=1", ["optim.lr has no effect", "job=train"]),
    ("logger.wandb_project=x", ["wandb_project has no effect", "logger.wandb=true"]),
    ("checkpoint.export_hf=false job.sample_prompt=x", ["job.sample_prompt has no effect"]),
    ("run_id=a/b", ["run_id=a/b", "letters"]),
    ("run_id=..", ["run_id=.."]),
    ("run_id=latest", ["run_id=latest"]),
    ("run_id=" + "a" * 300, ["300 characters", "128"]),
    ("checkpoint.resume=", ["checkpoint.resume is empty", "leave it out"]),
    ("model.weights=", ["model.weights is empty", "leave it out"]),
    ("schedule.steps=99999999999999999999", ["schedule.steps", "less than 2**63"]),
    ("schedule.steps=-1", ["schedule.steps=-1"]),
    ("hardware=cpu parallelism.dp=100000 data.global_batch_size=100000", ["100000 processes", "cores"]),
    ("run_id=''", ["run_id="]),
    # jobs
    ("prompt=hello", ["prompt", "job=sample"]),
    ("grad=true", ["grad=true", "job=forward"]),
    ("data.inputs=x.safetensors", ["data.inputs", "job=forward"]),
    ("job=forward", ["data.inputs is missing"]),
    ("job=forward data.inputs=absent.safetensors", ["absent.safetensors", "no such file"]),
    ("job=sample model.weights=x", ["prompt is missing"]),
    ("job=sample prompt=x", ["model.weights is missing"]),
    ("job=convert", ["job.source is missing"]),
    ("job=convert job.to=sharded", ["model.weights is missing"]),
    ("job=prepare checkpoint.resume=auto", ["checkpoint.resume", "job=train"]),
    ("checkpoint.resume=auto", ["checkpoint.resume=auto", "run_id"]),
    ("checkpoint.resume=/absent", ["/absent", "no such folder"]),
    # data
    ("data=text", ["data.path"]),
    ("data=text data.path=/absent.txt", ["/absent.txt"]),
    ("data.path=/absent.txt", ["data=text"]),
    ("data.tokenizer=/absent", ["/absent"]),
    # layouts; the tiny model has 4 layers, 4 heads, 2 key-value heads, a width of 768 in the middle
    ("parallelism.tp=3 parallelism.dp=1", ["tp=3", "num_attention_heads=4", "1, 2, 4"]),
    ("parallelism=tp2 model.intermediate_size=7", ["tp=2", "intermediate_size=7"]),
    (
        "parallelism.tp=6 model.num_attention_heads=12 model.num_key_value_heads=4",
        ["tp=6", "num_key_value_heads=4", "one must divide the other"],
    ),
    ("parallelism.pp=8 model.num_hidden_layers=4", ["pp=8", "more stages", "num_hidden_layers=4"]),
    ("parallelism.sp=true", ["sp=true", "tp"]),
    ("parallelism=tp2_sp data.seq_len=255", ["data.seq_len=255", "256"]),
    ("parallelism=cp2 data.seq_len=254", ["data.seq_len=254", "multiple of 4 with parallelism.cp=2", "256"]),
    ("parallelism=cp2_tp2 parallelism.tp=4 data.seq_len=252", ["seq_len=252", "multiple of 8", "tp=4 with sp", "256"]),
    ("parallelism=cp2 backend=native", ["parallelism.cp=2", "backend=megatron", "strategy=zero1"]),
    ("parallelism.cp=2 parallelism.strategy=fsdp backend=native", ["parallelism.cp=2", "strategy=fsdp"]),
    ("parallelism.cp=0", ["parallelism.cp=0", "at least 1"]),
    ("parallelism.vpp=2", ["parallelism.vpp=2", "parallelism.pp of at least 2"]),
    ("parallelism.vpp=2 backend=native", ["parallelism.vpp=2", "native"]),
    ("parallelism=pp2_vpp2 model.num_hidden_layers=6", ["pp=2 x parallelism.vpp=2", "num_hidden_layers=6", "1, 3"]),
    ("parallelism=pp2_vpp2 model.num_hidden_layers=5", ["pp=2 x parallelism.vpp=2", "without vpp pp need not divide"]),
    (
        "parallelism=pp2_vpp2 model.num_hidden_layers=4 data.global_batch_size=4",
        ["vpp=2", "pp 2 stages", "global_batch_size=4 makes 1", "global_batch_size=8"],
    ),
    ("parallelism.ep=2", ["ep=2", "must be 1"]),
    ("model=tiny_moe parallelism=ep2 parallelism.dp=1", ["the 1 rank of", "set parallelism.dp=2 (2 ranks) or", "ep=1"]),
    (
        "model=tiny_moe parallelism.ep=2 parallelism.dp=3 data.global_batch_size=12",
        ["dp=2 (2 ranks)", "dp=4 (4 ranks)"],
    ),
    (
        "model=tiny_moe parallelism=ep2_tp2 parallelism.ep=4 parallelism.dp=1",
        ["the 2 ranks of", "set parallelism.dp=2 (4 ranks) or parallelism.ep=2"],
    ),
    ("model=tiny_moe parallelism=ep2 launcher.nproc_per_node=1", ["gives 1; set launcher.nproc_per_node=2"]),
    ("parallelism=dp2 launcher.nproc_per_node=3", ["needs 2 ranks"]),
    ("data.global_batch_size=10", ["global_batch_size=10", "4", "=8", "micro_batch_size=2"]),
    ("parallelism=dp2 data.global_batch_size=4", ["global_batch_size=4", "= 8", "global_batch_size=8"]),
    ("backend=native parallelism=tp2", ["parallelism.tp=2", "native"]),
    ("backend=native parallelism=pp2", ["parallelism.pp=2", "native"]),
    ("parallelism=fsdp2", ["strategy=fsdp", "backend=native"]),
    ("backend=native parallelism.strategy=hsdp", ["hsdp", "shard_size"]),
    ("backend=native parallelism=hsdp parallelism.shard_size=3 launcher.nproc_per_node=4", ["shard_size=3", "dp=4"]),
    ("parallelism.shard_size=2", ["shard_size=2", "hsdp"]),
    ("parallelism.overlap=true backend=native", ["overlap", "megatron"]),
    ("precision.compile=true parallelism=tp2", ["compile", "parallelism.tp=2"]),
    ("precision.compile=true parallelism.recompute=selective", ["compile", "recompute=selective"]),
    ("data.seq_len=4096", ["data.seq_len=4096", "max_position_embeddings=2048"]),
    ("data.vocab_size=256", ["data.vocab_size=256", "at least 257"]),
    ("model.vocab_size=100", ["vocab_size=100", "at least 257"]),
    ("data.vocab_size=5000", ["data.vocab_size=5000", "model.vocab_size=4096"]),
    ("launcher.nodes=2 parallelism=dp2", ["launcher.nodes=2", "launcher=torchrun"]),
    ("launcher=torchrun launcher.nodes=2 parallelism=dp2 launcher.master_addr=n0", ["launcher.node_rank is missing"]),
    (
        "launcher=torchrun launcher.nodes=2 parallelism=dp2 launcher.node_rank=2 launcher.master_addr=n0",
        ["node_rank=2", "less than launcher.nodes=2"],
    ),
    ("launcher=torchrun launcher.nodes=2 parallelism=dp2 launcher.node_rank=0", ["launcher.master_addr is missing"]),
    ("hardware=nvidia", ["hardware=nvidia"]),
]


@pytest.mark.parametrize(("overrides", "words"), BAD)
def test_what_cannot_be_is_refused_in_one_line(overrides, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hardware = [] if "hardware" in overrides else ["hardware=cpu"]
    with pytest.raises(UserError) as error:
        prepare("qwen3", [*hardware, *ROWS, *overrides.split()])
    text = str(error.value)
    assert len(text.splitlines()) == 1, text
    assert [word for word in words if word not in text] == [], text
    assert list(tmp_path.iterdir()) == []


# words of a command that can be printed -> what its notes say; None: nothing.
DOUBTS = [
    ("model=8b", None),
    ("model=235b_a22b parallelism.tp=4 parallelism.sp=true parallelism.pp=2 parallelism.ep=8 parallelism.dp=2", None),
    # 235,093,634,560 parameters of 2 bytes
    ("model=235b_a22b precision=bf16", ["each rank holds 235B parameters, 470 GB in bf16", "more than 288 GB", "ep"]),
    ("model=235b_a22b precision=bf16 backend=native parallelism=fsdp parallelism.dp=2", None),
    ("model=32b model.hidden_size=100000000", ["TB in", "parallelism.tp"]),
    ("model.num_hidden_layers=100000 model=30b_a3b", ["100000 layers of 128 experts are more than any model has"]),
    ("parallelism=single parallelism.dp=1000000 data.global_batch_size=1000000 data.micro_batch_size=1", [
        "1000000 ranks on one node", "1000000 ranks: the largest clusters have about 200000",
    ]),
    # 10^9 tokens of 256 channels and 4 bytes
    ("data.seq_len=1000000000 model.max_position_embeddings=1000000000 data.micro_batch_size=1", [
        "data.seq_len=1000000000: one layer's states", "1.02 TB on each rank", "parallelism.cp (now 1",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), DOUBTS)
def test_sizes_beyond_any_machine_are_noted_and_printed_all_the_same(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notes = plan("qwen3", ["hardware=cpu", "launcher=print", *words.split()]).notes
    assert bool(notes) == bool(said), notes
    assert [word for word in said or () if word not in " ".join(notes)] == [], notes


GOOD = [
    "parallelism.tp=4",  # more ranks than key-value heads, a multiple of them
    "parallelism=tp2_sp",
    "parallelism=tp2_pp2 parallelism.dp=2",
    "parallelism=pp2 model.num_hidden_layers=2",
    "parallelism.pp=3 model.num_hidden_layers=4",
    "parallelism=cp2",
    "parallelism=cp2_tp2",
    "parallelism=cp2_pp2",
    "parallelism.cp=8 data.seq_len=1024",
    "parallelism=pp2_vpp2 model.num_hidden_layers=4",
    "parallelism=pp2_vpp2 model.num_hidden_layers=4 data.global_batch_size=6 data.micro_batch_size=2",  # 3 over pp 2
    "parallelism=tp2 model.vocab_size=331",
    "model.num_key_value_heads=1 model.head_dim=24 parallelism=tp2",
    "backend=native parallelism=hsdp",
    "backend=native parallelism=fsdp2",
    "backend=native parallelism=zero1",
    "schedule.steps=1",
    "schedule.steps=5",
    "schedule=wsd schedule.steps=1",
    "optim.clip_grad=0 optim.weight_decay=0 data.held_out=0",
    "model=8b parallelism=tp4_pp2 launcher=print",
    "model=32b parallelism=tp8_pp4 launcher=print launcher.nodes=4 hardware=nvidia",
    "job=prepare",
    "run_id=a.b_c-1",
    "backend=native model.hidden_act=gelu_new",
    "model.rope_scaling={rope_type:yarn,factor:2,original_max_position_embeddings:1024,beta_fast:16}",
    "backend=native model.rope_scaling={rope_type:dynamic,factor:2.5}",
    "model.use_sliding_window=true model.sliding_window=8 model.max_window_layers=2",
    "model.use_sliding_window=true model.sliding_window=8 model.max_window_layers=1",
    "data.vocab_size=257",
]


@pytest.mark.parametrize("overrides", GOOD)
def test_what_can_be_is_taken(overrides, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare("qwen3", ["hardware=cpu", *overrides.split()])


def test_several_mistakes_are_several_lines():
    with pytest.raises(UserError) as error:
        prepare("qwen3", ["hardware=cpu", "optim.lr=-1", "schedule.steps=0", "backend=x"])
    assert [line.split("=")[0] for line in str(error.value).splitlines()] == ["schedule.steps", "optim.lr", "backend"]


@pytest.mark.parametrize(
    ("words", "compiles", "wanted"),
    [
        (["backend=native", "precision=bf16"], True, True),
        (["backend=native", "precision=bf16"], False, False),
        (["backend=native", "precision=bf16", "precision.compile=false"], True, False),
        (["backend=native", "precision=fp32"], True, False),
        (["backend=megatron", "precision=bf16"], True, True),
        (["backend=megatron", "precision=bf16", "parallelism=dp2"], True, True),
        (["backend=megatron", "precision=bf16", "parallelism=tp2"], True, False),
        (["backend=megatron", "precision=bf16", "parallelism=cp2"], True, False),
        (["backend=megatron", "precision=bf16", "parallelism.recompute=selective"], True, False),
        (["backend=native", "precision=bf16", "job=forward"], True, False),
    ],
)
def test_layers_are_compiled_where_that_is_fast(words: list[str], compiles: bool, wanted: bool) -> None:
    run = compose(QWEN3, words).run
    assert resolve(run, 0, compiles=compiles).precision.compile is wanted
