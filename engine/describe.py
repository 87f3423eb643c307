"""What every key means. The words are the comments beside the schema's fields: one place, read by people and --help."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from functools import lru_cache

# Published keys mean the same in every family, whose schemas list only names and defaults.
PUBLISHED = {
    "vocab_size": "tokens that the embedding has rows for",
    "hidden_size": "width of the residual stream",
    "intermediate_size": "width inside the MLP",
    "num_hidden_layers": "layers",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "key and value heads, shared by groups of query heads",
    "head_dim": "width of one head",
    "hidden_act": "activation of the MLP",
    "max_position_embeddings": "tokens that a row can have",
    "initializer_range": "standard deviation of fresh weights",
    "rms_norm_eps": "added to the mean square in RMSNorm",
    "tie_word_embeddings": "the output layer is the embedding",
    "rope_theta": "base of the rotary angles",
    "rope_scaling": "rotary scaling, for example {rope_type: yarn, factor: 4.0, ...}",
    "attention_bias": "biases on query, key, value and output projections",
    "mlp_bias": "biases on the MLP's projections",
    "qkv_bias": "biases on query, key and value projections",
    "attention_dropout": "share of attention weights dropped in training",
    "use_sliding_window": "layers from max_window_layers on see sliding_window tokens only",
    "sliding_window": "tokens that a windowed layer sees",
    "max_window_layers": "the first layers, which have no window",
    "bos_token_id": "token that begins a text",
    "eos_token_id": "token that ends a text",
    "pad_token_id": "token that fills rows",
    "num_experts": "experts of a layer",
    "num_experts_per_tok": "experts that each token goes to",
    "moe_intermediate_size": "width inside an expert",
    "shared_expert_intermediate_size": "width inside the expert that every token goes to",
    "q_lora_rank": "width of the latent that queries are made of",
    "kv_lora_rank": "width of the latent that keys and values are made of",
    "qk_nope_head_dim": "channels of a head without positions",
    "qk_rope_head_dim": "channels of a head with positions",
    "v_head_dim": "width of a head's values",
    "first_k_dense_replace": "the first layers, which have no experts",
    "n_routed_experts": "experts of a layer",
    "n_shared_experts": "width of what every token goes to, in experts",
    "n_group": "groups of experts",
    "topk_group": "groups that a token's experts come from",
    "routed_scaling_factor": "factor on the experts' weights",
    "decoder_sparse_step": "every n-th layer has experts",
    "mlp_only_layers": "layers without experts",
    "norm_topk_prob": "the chosen experts' probabilities are scaled to a sum of 1",
    "router_aux_loss_coef": "weight of the loss that balances the experts",
    "output_router_logits": "the loss includes the balancing loss",
}


@lru_cache(maxsize=64)
def descriptions(cls: type) -> dict[str, str]:
    """A line for each field of a dataclass: the comment at its end or, for a published key, the common words."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__ != "builtins" and "__annotations__" in vars(base):
            found |= _own(base)
    return found


def _own(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # made at run time, such as the narrowed schema of a family
        return {}
    comments = {
        token.start[0]: _words(token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    fields = [node for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {
        node.target.id: words  # type: ignore[union-attr]
        for node in fields
        if (words := comments.get(node.end_lineno or 0) or PUBLISHED.get(node.target.id))  # type: ignore[union-attr]
    }


def _words(comment: str) -> str:
    """A comment without its marks and without what only a type checker reads."""
    parts = (part.strip() for part in comment.split("#"))
    return " ".join(part for part in parts if part and not part.startswith(("type:", "noqa")))
