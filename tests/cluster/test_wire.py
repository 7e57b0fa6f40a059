import msgspec
import numpy as np
import pytest

from cluster import worker_messages as m
from cluster.errors import WireError
from cluster.messages import ToEngine
from cluster.wire import PROTOCOL_VERSION, Decoder, encode


def make_descriptor() -> m.StepDescriptor:
    column = np.arange(3, dtype=np.int32)
    return m.StepDescriptor(
        7, 0, "negotiated", column, column, column, column, column, column, column,
        np.arange(10, dtype=np.int32), column, np.empty(0, np.int32),
        column, np.empty(0, np.int32), np.empty(0, np.int32), column, np.empty(0, np.int32),
    )  # fmt: skip


def test_a_descriptor_survives_with_dtypes_and_empty_columns() -> None:
    sent = make_descriptor()
    received = Decoder(m.ToWorker).decode(encode(sent))
    for name in m.StepDescriptor.__struct_fields__:
        before, after = getattr(sent, name), getattr(received, name)
        if isinstance(before, np.ndarray):
            assert after.dtype == before.dtype
            np.testing.assert_array_equal(after, before)
        else:
            assert after == before


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_the_highest_expert_ids_survive_in_their_dtype(num_experts: int, dtype: type) -> None:
    ids = np.full((2, 3, 4), num_experts - 1, dtype)
    chunk = m.RouteChunk(1, 2, ids, np.ones((2, 3, 4), np.float32))
    received = Decoder(m.ToWorker).decode(encode(chunk))
    assert received.topk_ids.dtype == dtype
    np.testing.assert_array_equal(received.topk_ids, ids)


def test_received_arrays_are_read_only() -> None:
    received = Decoder(m.ToWorker).decode(encode(make_descriptor()))
    with pytest.raises(ValueError, match="read-only"):
        received.input_ids[0] = 1


def test_another_protocol_version_is_refused_with_both_numbers() -> None:
    frame = bytes([PROTOCOL_VERSION + 1]) + encode(make_descriptor())[1:]
    with pytest.raises(
        WireError, match=f"version {PROTOCOL_VERSION + 1}, expected {PROTOCOL_VERSION}"
    ):
        Decoder(m.ToWorker).decode(frame)


@pytest.mark.parametrize(
    "frame", [b"", bytes([PROTOCOL_VERSION]), bytes([PROTOCOL_VERSION]) + b"\xc1"]
)
def test_garbage_is_a_wire_error(frame: bytes) -> None:
    with pytest.raises(WireError):
        Decoder(m.ToWorker).decode(frame)


def test_a_message_of_another_conversation_is_refused() -> None:
    with pytest.raises(WireError):
        Decoder(ToEngine).decode(encode(make_descriptor()))


def test_an_array_whose_bytes_do_not_fit_its_shape_is_refused() -> None:
    class Forged(msgspec.Struct, tag="RouteChunk"):
        route_id: int
        step_id: int
        topk_ids: list[object]
        topk_weights: list[object]

    forged = Forged(1, 2, ["|u1", [2, 2], b"abc"], ["<f4", [1], b"abcd"])
    with pytest.raises(WireError):
        Decoder(m.ToWorker).decode(encode(forged))


def test_object_arrays_never_cross() -> None:
    with pytest.raises(WireError, match="dtype"):
        encode(m.RouteChunk(1, 2, np.array([None]), np.array([None])))
