"""Convert messages and tensors to frames, and back.

Nothing executable travels: a message is a tagged struct of the union `AnyMessage`, encoded as MessagePack, and tensors
follow as raw frames whose names, dtypes and shapes are in the header. `decode` accepts only what `encode` produces.
"""

from __future__ import annotations

import math
from typing import cast

import msgspec
import numpy as np

from asyncspec.wire.messages import AnyMessage, Arrays, Message

WIRE_VERSION = 19
MAX_DIMENSIONS = 8
MAX_MESSAGE_BYTES = 1 << 30
_DTYPES = {"float32", "float16", "int32", "int64", "uint8", "bool"}


class WireError(ValueError):
    """The frames are not a valid message, or a message is too large to send."""


class _ArraySpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class _Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    wire: int
    body: AnyMessage
    arrays: tuple[_ArraySpec, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Envelope)


def encode(body: Message, arrays: Arrays | None = None) -> list:
    """Return the frames of a message: one header, then one buffer for each array.

    Raises:
        WireError: the arrays are larger than a receiver would accept.
    """
    kept = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
    if (size := sum(array.nbytes for array in kept.values())) > MAX_MESSAGE_BYTES:
        raise WireError(f"{type(body).__name__} with {size} bytes of tensors: expected at most {MAX_MESSAGE_BYTES}")
    specs = tuple(_ArraySpec(name, array.dtype.name, array.shape) for name, array in kept.items())
    return [
        _encoder.encode(_Envelope(WIRE_VERSION, cast(AnyMessage, body), specs)),
        *(a.reshape(-1).view(np.uint8).data for a in kept.values()),
    ]


def decode(frames: list) -> tuple[Message, Arrays]:
    """Return the message and arrays of `frames`.

    Raises:
        WireError: `encode` does not produce such frames: another wire version, an unknown type, sizes that disagree.
    """
    if not frames or sum(len(f) for f in frames) > MAX_MESSAGE_BYTES:
        raise WireError(f"{len(frames)} frames: expected at least one, and at most {MAX_MESSAGE_BYTES} bytes")
    try:
        envelope = _decoder.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"header: {error}") from None
    if envelope.wire != WIRE_VERSION:
        raise WireError(f"wire version {envelope.wire}: expected {WIRE_VERSION}")
    if len(envelope.arrays) != len(frames) - 1:
        raise WireError(
            f"{len(frames) - 1} tensor frames: expected as in the header, which lists {len(envelope.arrays)}"
        )
    arrays: Arrays = {}
    for spec, frame in zip(envelope.arrays, frames[1:]):
        sides_valid = len(spec.shape) <= MAX_DIMENSIONS and all(0 <= side <= MAX_MESSAGE_BYTES for side in spec.shape)
        if spec.dtype not in _DTYPES or not sides_valid or spec.name in arrays:
            raise WireError(
                f"tensor {spec.name!r}: dtype {spec.dtype!r} or shape {spec.shape} not allowed, or name repeated"
            )
        dtype = np.dtype(spec.dtype)
        if math.prod(spec.shape) * dtype.itemsize != len(frame):
            raise WireError(f"tensor {spec.name!r}: {len(frame)} bytes do not fill {spec.shape} of {spec.dtype}")
        try:
            arrays[spec.name] = np.frombuffer(frame, dtype).reshape(spec.shape)
        except ValueError as error:  # the tensor is empty, but its other sides multiply to more than numpy allows
            raise WireError(f"tensor {spec.name!r}: shape {spec.shape}: {error}") from None
    return envelope.body, arrays
