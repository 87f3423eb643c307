"""Messages: the bytes are openpi's, and nothing but plain numbers comes through."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from eval import protocol
from eval.protocol import ProtocolError, checked_actions, pack, unpack


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint8).reshape(1, 2, 3),
        np.zeros((0, 7), np.float32),
        np.array(2.5),
        np.array([[True], [False]]),
        np.arange(12, dtype=">i4").reshape(3, 4).T,
    ],
)
def test_arrays_come_back(array: np.ndarray) -> None:
    back = unpack(pack({"a": {"b": [array, 1]}}))["a"]["b"][0]
    assert back.dtype == array.dtype and back.shape == array.shape
    assert np.array_equal(back, array) and back.flags.writeable


def test_the_bytes_are_the_published_ones() -> None:
    """Written out by hand from msgpack's specification and openpi's keys."""
    data = pack({"x": np.array([1, 2], np.uint8)})
    assert data == (
        b"\x81\xa1x\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x02\x01\x02\xc4\x05dtype\xa3|u1\xc4\x05shape\x91\x02"
    )
    assert unpack(pack({"n": np.float32(0.5)}))["n"] == np.float32(0.5)


def array_message(**changes: object) -> bytes:
    values = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}
    return msgpack.packb({"a": values | {k.encode(): v for k, v in changes.items()}})


@pytest.mark.parametrize(
    "data, words",
    [
        (b"\xc1garbage", "not msgpack"),
        (b"", "not msgpack"),
        (b"\x93\x01\x02\x03", "must be a map"),
        ("text", "must be binary"),
        (b"\x81" * 3000, "not msgpack"),
        (array_message(dtype="|O"), "only numbers"),
        (array_message(dtype="<U2"), "only numbers"),
        (array_message(dtype="f4,f4"), "only numbers"),
        (array_message(dtype="nonsense"), "only numbers"),
        (array_message(dtype=3), "only numbers"),
        (array_message(shape=[3]), "holds 8 bytes"),
        (array_message(shape=[2**40, 2**40]), "holds 8 bytes"),
        (array_message(shape=[-2]), "whole numbers"),
        (array_message(shape="2"), "whole numbers"),
        (array_message(shape=[True, 2]), "whole numbers"),
        (array_message(data=7), "holds a value"),
        (msgpack.packb({"a": {b"__npgeneric__": True, b"dtype": "<i4", b"data": "x"}}), "is no <i4"),
    ],
)
def test_what_is_no_message_is_one_line(data: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words) as caught:
        unpack(data)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("value", [np.array([object()]), np.array(["a"]), np.zeros(2, complex), {1, 2}])
def test_what_cannot_be_sent(value: object) -> None:
    with pytest.raises(ProtocolError, match="cannot be sent"):
        pack({"a": value})


@pytest.mark.parametrize(
    "actions, words",
    [
        ([[1, 2, 3]], "must be an array"),
        (np.zeros(3), "shape"),
        (np.zeros((0, 3)), "shape"),
        (np.zeros((1, 4)), "4 numbers; 3 are needed"),
        (np.array([[0, 0, 0], [0, np.inf, 0]]), "inf at step 1, number 1"),
        (np.array([["a", "b", "c"]]), "must be an array"),
    ],
)
def test_actions_are_checked(actions: object, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        checked_actions(actions, 3)


def test_another_version_is_named() -> None:
    with pytest.raises(ProtocolError, match="the server speaks version 9 of zooforge-policy; this program speaks"):
        protocol.check_version(9, "the server")
