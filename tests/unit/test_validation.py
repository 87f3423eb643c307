"""One loss for each validation set and one over all of them: by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from engine.metrics.progress import validation_text
from engine.validation import unusable, validate


def held_out(loss, tokens, size, coverage):
    return SimpleNamespace(
        batches=lambda rows: (loss, tokens), label_bytes=lambda rows: size, coverage=lambda rows: coverage
    )


BACKEND = SimpleNamespace(evaluate=lambda batches: batches)


def test_sets_are_weighted_by_their_tokens():
    sets = {"code": held_out(30.0, 10, 40, (5, 5, True)), "prose": held_out(20.0, 40, 60, (7, 21, False))}
    fields = validate(BACKEND, sets, 7)
    assert fields == {
        "val_loss": 1.0,
        "val_tokens": 50,
        "val_rows": 12,
        "val_rows_of": 26,
        "val_rows_whole": False,
        "val_bits_per_byte": pytest.approx(50 / math.log(2) / 100),
        "val_loss.code": 3.0,
        "val_loss.prose": 0.5,
    }
    assert validation_text({"step": 4, **fields}) == (
        "step 4: validation loss 1.0000, 0.721 bits per byte (code 3.0000, prose 0.5000)"
    )
    assert unusable(fields) is None


def test_a_tokenizer_that_cannot_count_bytes_and_a_set_without_a_name():
    fields = validate(BACKEND, {"": held_out(30.0, 10, None, (5, 5, True))}, 7)
    assert fields == {"val_loss": 3.0, "val_tokens": 10, "val_rows": 5, "val_rows_of": 5, "val_rows_whole": True}
    assert validate(BACKEND, {}, 7) == {}
    assert validate(BACKEND, {"": held_out(0.0, 0, 0, (0, 0, True))}, 7)["val_loss"] == 0.0


def test_the_set_that_is_not_finite_is_named():
    sets = {"code": held_out(3.0, 10, 4, (5, 5, True)), "prose": held_out(math.inf, 4, 6, (7, 21, False))}
    assert unusable(validate(BACKEND, sets, 7)) == "val_loss.prose=inf"
