"""The messages between a policy and whoever asks it: msgpack with numpy arrays, over websockets.

The wire is that of openpi's client: on connecting the server sends its metadata, then each observation is answered by
`{"actions": [T, D]}`, or by a text that says what was wrong. What openpi does not know travels in one more key,
`zooforge`: the version of the protocol, a request id, the episode, its step and the seed of the sampling. Whoever
leaves it out is still served.

Needs numpy and msgpack only, since it also runs in the environments of simulators.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np

from engine.errors import UserError

NAME = "zooforge-policy"
VERSION = 1
ENVELOPE = "zooforge"  # of a request: {"version", "id", "session", "step", "seed"}; of an answer: {"id"}
ACTIONS = "actions"
PROMPT = "prompt"
STATE = "observation/state"
PRIVILEGED = "privileged"  # what only a simulator knows: poses of objects by name, for policies that need it
KINDS = "biuf"  # of numpy's dtypes: plain numbers, nothing that could run or point anywhere
MAX_BYTES = 64 * 2**20


class ProtocolError(UserError):
    """A message that is none, or one that breaks the rules: one line for the other side."""


def image_key(camera: str) -> str:
    """Where an observation holds what a camera sees."""
    return f"observation/{camera}"


def pack(message: dict[str, Any]) -> bytes:
    """The bytes of a message. ProtocolError for arrays of anything but numbers."""
    return msgpack.packb(message, default=_encode)


def unpack(data: bytes | str) -> dict[str, Any]:
    """The message that some bytes hold; its arrays can be written to. ProtocolError for anything else."""
    if isinstance(data, str):
        raise ProtocolError("the message is text; it must be binary msgpack")
    try:
        message = msgpack.unpackb(data, object_hook=_decode)
    except ProtocolError:
        raise
    except Exception as error:  # msgpack has no common base for what garbage makes it raise
        raise ProtocolError(f"the message is not msgpack ({type(error).__name__}: {error})") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"the message is {_kind(message)}; it must be a map")
    return message


def _encode(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in KINDS:
            raise ProtocolError(f"an array of {value.dtype} cannot be sent; only numbers can")
        if isinstance(value, np.generic):
            return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    raise ProtocolError(f"{_kind(value)} cannot be sent")


def _decode(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        dtype, shape, data = _dtype(value), value.get(b"shape"), value.get(b"data")
        if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape) or len(shape) > 8:
            raise ProtocolError(f"an array has the shape {str(shape)[:60]}; it must be whole numbers")
        if not isinstance(data, bytes) or math.prod(shape) * dtype.itemsize != len(data):
            held = f"{len(data)} bytes" if isinstance(data, bytes) else _kind(data)
            raise ProtocolError(f"an array of shape {shape} and type {dtype} holds {held}")
        return np.frombuffer(data, dtype).reshape(shape).copy()
    if b"__npgeneric__" in value:
        try:
            return _dtype(value).type(value.get(b"data"))
        except (TypeError, ValueError, OverflowError):
            raise ProtocolError(f"{str(value.get(b'data'))[:60]} is no {value.get(b'dtype')}") from None
    return value


def _dtype(value: dict[Any, Any]) -> np.dtype[Any]:
    name = value.get(b"dtype")
    try:
        dtype = np.dtype(name if isinstance(name, str) else "?x")
    except (TypeError, ValueError, SyntaxError):
        raise ProtocolError(f"an array has the type {str(name)[:60]}; only numbers are read") from None
    if dtype.kind not in KINDS:
        raise ProtocolError(f"an array has the type {dtype}; only numbers are read")
    return dtype


def _kind(value: Any) -> str:
    return f"a value of type {type(value).__name__}"


def check_version(found: Any, whose: str) -> None:
    """ProtocolError unless the other side speaks this version."""
    if found != VERSION:
        raise ProtocolError(f"{whose} speaks version {found} of {NAME}; this program speaks version {VERSION}")


def checked_actions(actions: Any, size: int | None, whose: str = "the policy") -> np.ndarray:
    """Actions as float32 [T, D]. ProtocolError for another shape or size, and for values that are not finite."""
    if not isinstance(actions, np.ndarray) or actions.dtype.kind not in "iuf":
        raise ProtocolError(f"{whose} gave {_kind(actions)} for actions; it must be an array of numbers [steps, size]")
    if actions.ndim != 2 or not len(actions):
        raise ProtocolError(f"{whose} gave actions of shape {list(actions.shape)}; it must be [steps, size]")
    if size and actions.shape[1] != size:
        raise ProtocolError(f"{whose} gave actions of {actions.shape[1]} numbers; {size} are needed")
    if not np.isfinite(actions).all():
        step, number = np.argwhere(~np.isfinite(actions))[0]
        raise ProtocolError(
            f"{whose} gave an action that is not finite: {actions[step, number]} at step {step}, number {number}"
        )
    return np.ascontiguousarray(actions, dtype=np.float32)
