"""Training with the indexers' loss against a plain loop over the reference and the paper's formulas."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.data.batch import IGNORE
from engine.data.loader import build_data
from engine.freeze import load_run
from engine.schedule import learning_rate
from tests import harness
from tests.parity.test_training import move_biases, root, steps_of, training_config, with_words
from tests.ranks import Ranks

__all__ = ["root"]
STEPS, WEIGHT = 3, 0.7
SPARSE = {str(case): case for case, _ in harness.discover() if case.family in ("deepseek_v32", "glm5")}
CASES = {name: with_words(SPARSE[name]) for name in ("deepseek_v32-groups_and_yarn", "glm5-shared_indexers")}


def turned(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """Channels turned by angles: neighbours together, or those of the two halves."""
    out = torch.empty_like(x)
    for i in range(x.shape[-1] // 2):
        a, b = (2 * i, 2 * i + 1) if pairs else (i, i + x.shape[-1] // 2)
        c, s = cos[..., None, i], sin[..., None, i]
        out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return out


def index_scores(indexer: Any, hidden: Tensor, latent: Tensor, angles: tuple[Tensor, Tensor], pairs: bool) -> Tensor:
    """[B, S, S]: I = sum over heads of w relu(q k) (DeepSeek-V3.2, equation 1), with the published code's two roots."""
    rotary, width = indexer.qk_rope_head_dim, indexer.head_dim
    q = indexer.wq_b(latent).unflatten(-1, (-1, width))
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    q, k = (torch.cat([turned(x[..., :rotary], *angles, pairs), x[..., rotary:]], -1) for x in (q, k))
    dots = torch.einsum("bsiw,btw->bsti", q, k[:, :, 0]).relu() / width**0.5
    return (dots * indexer.weights_proj(hidden)[:, :, None, :]).sum(-1) / indexer.n_heads**0.5


class Listener:
    """What an attention with an indexer sees and does, and the loss of it."""

    def __init__(self, attention: Any, pairs: bool, dense: bool) -> None:
        self.attention, self.pairs, self.dense = attention, pairs, dense
        self.divergence: Tensor = torch.zeros(())
        attention.indexer.register_forward_pre_hook(self.see, with_kwargs=True)
        attention.register_forward_hook(self.hear)

    def see(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, latent, angles, self.mask, *_ = args
        self.scores = index_scores(self.attention.indexer, hidden.detach(), latent.detach(), angles, self.pairs)

    def hear(self, _: Any, __: Any, output: tuple[Tensor, ...]) -> None:
        """Equation 4: p is what attention's heads do together; equation 3 is the same where all keys are chosen."""
        p = output[1].detach().sum(1)
        p = p / p.sum(-1, keepdim=True)
        chosen = p > 0
        if self.dense:
            assert (chosen == (self.mask == 0)).all(), "the reference's indexer is to choose every key"
        log_q = self.scores.masked_fill(~chosen, float("-inf")).log_softmax(-1)
        self.divergence = (p[chosen] * (p[chosen].log() - log_q[chosen])).sum()


def plain_loop(config: Path, case: harness.Case, dense: bool) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and the indexers' loss of each step."""
    run = load_run(config)
    model = harness.reference(case.card, case.published | ({"index_topk": 1000} if dense else {}))
    attentions = [module for module in model.modules() if getattr(module, "indexer", None) is not None]
    listeners = [Listener(module, case.family == "glm5", dense) for module in attentions]
    loads: dict[str, Tensor] = {}

    def count(name: str, _: Any, __: Any, output: tuple[Tensor, ...]) -> None:
        loads[name] = loads.get(name, 0) + torch.bincount(output[-1].flatten(), minlength=output[0].shape[-1])

    for name, module in model.named_modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(partial(count, name))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not dense or ".indexer." in name)
    learnt = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learnt if p.dim() >= 2], "weight_decay": run.optim.weight_decay},
        {"params": [p for p in learnt if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=tuple(run.optim.betas), eps=run.optim.eps)
    stream, rows = build_data(run, 0, 1).train, []
    for step in range(STEPS):
        batches = stream.next_step()
        supervised = sum(batch.num_tokens for batch in batches)
        tokens = sum(batch.tokens_BS.numel() for batch in batches)
        optimizer.zero_grad()
        loads.clear()
        total = divergence = 0.0
        for batch in batches:
            logits, own = [], torch.zeros(())
            for piece in batch.tokens_BS.flatten().split(batch.cu_seqlens.diff().tolist()):  # a document by itself
                logits.append(model(input_ids=piece[None], use_cache=False).logits[0])
                own = own + sum(listener.divergence for listener in listeners)
            loss = torch.nn.functional.cross_entropy(
                torch.cat(logits), batch.labels_BS.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            (loss / supervised + WEIGHT * own / tokens).backward()
            total, divergence = total + loss.item(), divergence + own.item()
        norm = torch.nn.utils.clip_grad_norm_(learnt, run.optim.clip_grad).item()
        rows.append((total / supervised, norm, divergence / tokens / len(listeners)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, run.optim.lr, run.schedule)
        optimizer.step()
        if not dense:
            move_biases(model, loads, run.moe.bias_update_rate)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sparse", "dense"])
@pytest.mark.parametrize("layout", ["megatron-single", "megatron-tp2_sp", "megatron-pp2", "megatron-cp2"])
@pytest.mark.parametrize("name", CASES)
def test_steps_equal_a_plain_loop(ranks: Ranks, root: Path, name: str, layout: str, stage: str) -> None:
    case = CASES[name]
    words = (f"schedule.steps={STEPS}", f"indexer.loss={WEIGHT}", f"indexer.stage={stage}", "moe.aux_loss=0")
    config, world = training_config(root, layout, f"{name}-{layout}-{stage}-indexer", *words, case=case)
    codes = ranks.run(config, world)
    assert codes == [0] * world, (config.parent / "result.json").read_text()
    rows = steps_of(config.parent)
    expected = plain_loop(config, case, stage == "dense")
    for key, wanted in zip(("loss", "grad_norm", "indexer_loss"), zip(*expected, strict=True), strict=True):
        assert [row[key] for row in rows] == pytest.approx(wanted, rel=1e-4 if key == "grad_norm" else 1e-5), key
