"""`job=sample`: continue a prompt with the reference implementation, from a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.context import Context
from engine.errors import UserError
from engine.family import load_dotted


def run(context: Context) -> None:
    """Print a continuation of `prompt`."""
    settings = context.run
    if context.rank != 0:
        return
    text = generate(
        context,
        Path(settings.model.weights),
        settings.prompt or "",
        settings.job.max_new_tokens,
        settings.job.temperature,
        settings.job.top_k,
    )
    context.result |= {"prompt": settings.prompt, "text": text}
    print(f"{settings.prompt}{text}", flush=True)


def continuation(context: Context, folder: Path) -> dict[str, str]:
    """The text sample at the end of a training run."""
    job = context.run.job
    prompt = _first_question(context.result.get("conversations")) or job.sample_prompt
    text = generate(context, folder, prompt, job.sample_tokens, temperature=0.8, top_k=50)
    return {"prompt": prompt, "text": text}


def _first_question(conversations: list[dict[str, Any]] | None) -> str | None:
    """What comes before the first answer of a run on conversations: a prompt of the shape that it learned from."""
    pieces = conversations[0]["pieces"] if conversations else ()
    return pieces[0][1] if len(pieces) > 1 and not pieces[0][0] else None


def generate(context: Context, folder: Path, prompt: str, tokens: int, temperature: float, top_k: int) -> str:
    """Up to `tokens` new tokens after `prompt`, as far as the model's positions reach; temperature 0 is greedy.

    Only local files are read. Raises UserError for a prompt without a token, one that fills the model's context, a
    folder without a tokenizer, and weights that give no finite numbers.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"no usable tokenizer in {folder}: {str(error).splitlines()[0]}") from None
    device = context.hardware.device(context.local_rank)
    model_class = load_dotted(context.family.reference)
    model = model_class.from_pretrained(folder, local_files_only=True, use_safetensors=True).to(device).eval()
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    given, most = inputs["input_ids"].shape[1], model.config.max_position_embeddings
    if given == 0:
        raise UserError("prompt holds no token; give at least one character")
    if given >= most:
        raise UserError(f"prompt holds {given} tokens, and the model's context ends at {most}; shorten it")
    torch.manual_seed(context.run.seed)
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_k": top_k}
    pad = tokenizer.eos_token_id or 0
    with torch.inference_mode():
        if not torch.isfinite(model(**inputs.to(device)).logits).all():
            raise UserError(f"{folder}: the model's outputs are not finite; its weights hold NaN or Inf")
        output = model.generate(
            **inputs.to(device), max_new_tokens=min(tokens, most - given), pad_token_id=pad, **sampling
        )
    return tokenizer.decode(output[0, given:], skip_special_tokens=True)
