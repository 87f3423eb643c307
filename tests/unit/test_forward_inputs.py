"""Batches that job=forward refuses, each with its file, what is wrong and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import UserError
from engine.jobs.forward import read_inputs

IDS = torch.tensor([[1, 2, 3]])
BAD = [
    ({"input_ids": IDS.float()}, "input_ids torch.float32"),
    ({"input_ids": -IDS}, r"input_ids must lie in \[0, 5\)"),
    ({"input_ids": IDS, "labels": IDS + 4}, "labels must lie"),
    ({"input_ids": IDS, "labels": IDS[:, :2]}, "should have the shape of input_ids"),
    ({"input_ids": IDS[:, :0]}, "at least one of each"),
    ({"input_ids": IDS, "attention_mask": torch.tensor([[1, 0, 1]])}, "only at the beginning and the end"),
    ({"input_ids": IDS, "speed": IDS}, "holds speed"),
    ({"input_ids": IDS, "position_ids": torch.tensor([[0, 2, 3]])}, "goes from 0 to 2 in row 0, at token 1"),
    ({"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 1]])}, "goes from 1 to 1 in row 0, at token 2"),
    ({"input_ids": IDS, "position_ids": torch.tensor([[2, 1, 0]])}, "goes from 2 to 1"),
    ({"input_ids": IDS, "position_ids": torch.tensor([[-1, 0, 1]])}, "numbers below 0"),
]


@pytest.mark.parametrize(("tensors", "words"), BAD, ids=[words for _, words in BAD])
def test_refused(tensors: dict[str, torch.Tensor], words: str, tmp_path: Path) -> None:
    save_file({k: v.clone() for k, v in tensors.items()}, tmp_path / "batch.safetensors")
    with pytest.raises(UserError, match=words):
        read_inputs(tmp_path / "batch.safetensors", vocab_size=5)


@pytest.mark.parametrize("mask", [[1, 1, 1], [0, 1, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0]])
def test_padding_at_the_ends_is_taken(mask: list[int], tmp_path: Path) -> None:
    save_file({"input_ids": IDS, "attention_mask": torch.tensor([mask])}, tmp_path / "batch.safetensors")
    assert read_inputs(tmp_path / "batch.safetensors", vocab_size=5)["attention_mask"].tolist() == [mask]


@pytest.mark.parametrize(
    ("positions", "mask"),
    [
        ([0, 1, 2], [1, 1, 1]),
        ([0, 1, 0], [1, 1, 1]),  # two packed documents
        ([0, 0, 0], [1, 1, 1]),  # three of one token
        ([5, 6, 7], [1, 1, 1]),  # only differences count
        ([1, 0, 1], [0, 1, 1]),  # padded in front, as transformers fills positions there
        ([0, 1, 1], [1, 1, 0]),
    ],
)
def test_positions_that_count_up_or_restart_are_taken(positions: list[int], mask: list[int], tmp_path: Path) -> None:
    tensors = {"input_ids": IDS, "attention_mask": torch.tensor([mask]), "position_ids": torch.tensor([positions])}
    save_file(tensors, tmp_path / "batch.safetensors")
    assert read_inputs(tmp_path / "batch.safetensors", vocab_size=5)["position_ids"].tolist() == [positions]
