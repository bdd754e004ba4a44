"""Messages and tensors survive the wire, and damaged ones are refused."""

from typing import get_args

import numpy as np
import pytest
from groups import ticket_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from asyncspec.wire import codec
from asyncspec.wire import messages as m

TICKET = ticket_of(7, [3, 12, 4, 13], [2**61, 5], step=3, min_version=2)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        arrays(
            st.sampled_from([np.float32, np.int32, np.int64, np.float16, np.uint8, np.bool_]),
            array_shapes(min_dims=0, min_side=0),
        ),
        max_size=4,
    )
)
def test_messages_and_tensors_survive_the_wire(tensors):
    body, received = codec.decode([bytes(f) for f in codec.encode(TICKET, tensors)])
    assert body == TICKET and received.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape
        assert received[name].tobytes() == tensor.tobytes()


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_random_frames_are_refused(frames):
    with pytest.raises(codec.WireError):
        codec.decode(frames)


@settings(max_examples=200)
@given(st.data())
def test_damaged_messages_are_refused_or_still_well_formed(data):
    frames = [bytearray(f) for f in codec.encode(TICKET, {"x": np.arange(6, dtype=np.int32).reshape(2, 3)})]
    frame = data.draw(st.sampled_from(frames))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        body, tensors = codec.decode([bytes(f) for f in frames])
    except codec.WireError:
        return
    assert isinstance(body, m.Message)
    for tensor in tensors.values():
        tensor.sum()


def test_a_tensor_frame_of_the_wrong_size_is_refused():
    frames = codec.encode(TICKET, {"x": np.zeros(4, np.float32)})
    with pytest.raises(codec.WireError, match="do not fill"):
        codec.decode([frames[0], b"\0" * 12])
    with pytest.raises(codec.WireError, match="lists 1"):
        codec.decode([frames[0]])


@pytest.mark.parametrize(
    "shape", [(1,) * 65, (0, 2**62, 2**62), (0, 2**63), (2**64 - 1, 0), (0, 2**30, 2**30, 2**30), (-1, 0)]
)
def test_a_tensor_of_an_impossible_shape_is_refused(shape):
    header = codec._encoder.encode(
        codec._Envelope(codec.WIRE_VERSION, m.Ready("x"), (codec._ArraySpec("x", "int64", shape),))
    )
    with pytest.raises(codec.WireError):
        codec.decode([header, b"\1" * 8 if 0 not in shape else b""])


def test_every_message_can_be_decoded():
    declared = {each for each in vars(m).values() if isinstance(each, type) and issubclass(each, m.Message)}
    assert declared - {m.Message} == set(get_args(m.AnyMessage))
