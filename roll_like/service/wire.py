"""Messages that the client sends and wants as protocol buffers: batches to train on, their results, and samples.

The client's protocol fixes names, numbers and types of fields. A field that is not declared here is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from roll_like.inference.interface import TopLogprobs
from roll_like.service.types import Datum, RequestError, SampledTokens, SampleResult, TokenArray, TrainRequest
from roll_like.types import StopReason

CONTENT_TYPE = "application/x-protobuf"
_PACKAGE = "tinker_public"
_KINDS = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _KINDS.TYPE_STRING,
    "bytes": _KINDS.TYPE_BYTES,
    "bool": _KINDS.TYPE_BOOL,
    "int32": _KINDS.TYPE_INT32,
    "int64": _KINDS.TYPE_INT64,
    "uint32": _KINDS.TYPE_UINT32,
    "double": _KINDS.TYPE_DOUBLE,
}
#: Fields of each message, in the order of their numbers; `map` has strings as keys.
_MESSAGES: Mapping[str, Sequence[tuple[int, str, str]]] = {
    "SparseCsr": [(1, "bytes", "values"), (2, "bytes", "crow_indices"), (3, "bytes", "col_indices")],
    "Tensor": [(1, "bytes", "dense"), (2, "SparseCsr", "sparse_csr"), (3, "int32", "dtype"), (4, "[int64]", "shape")],
    "EncodedTextChunk": [(1, "bytes", "tokens")],
    "OtherChunk": [],
    "Chunk": [(1, "EncodedTextChunk", "encoded_text"), (2, "OtherChunk", "image"), (3, "OtherChunk", "dmel")],
    "Datum": [(1, "[Chunk]", "model_input"), (2, "map Tensor", "loss_fn_inputs")],
    "LossConfigValue": [(1, "double", "number"), (2, "string", "text")],
    "ForwardBackwardRequest": [
        (1, "string", "model_id"),
        (2, "int32", "seq_id"),
        (3, "[Datum]", "data"),
        (4, "string", "loss_fn"),
        (6, "bool", "forward_only"),
        (7, "map LossConfigValue", "loss_fn_config_v2"),
    ],
    "BatchedTensor": [
        (1, "bytes", "data"),
        (2, "bytes", "offsets"),
        (3, "int32", "dtype"),
        (4, "[int64]", "trailing_shape"),
    ],
    "ArrayRecord": [(1, "string", "type_tag"), (2, "map BatchedTensor", "fields"), (3, "int64", "num_datums")],
    "ForwardBackwardOutput": [
        (1, "string", "loss_fn_output_type"),
        (2, "[ArrayRecord]", "loss_fn_outputs"),
        (3, "map double", "metrics"),
    ],
    "TopkLogprobs": [(1, "bytes", "token_ids"), (2, "bytes", "logprobs"), (3, "uint32", "k"), (4, "uint32", "length")],
    "SampledSequence": [
        (1, "int32", "stop_reason"),
        (2, "bytes", "tokens"),
        (3, "bytes", "logprobs"),
        (4, "TopkLogprobs", "topk_sampled_logprobs"),
    ],
    "SampleResponse": [
        (1, "[SampledSequence]", "sequences"),
        (2, "bytes", "prompt_logprobs"),
        (3, "TopkLogprobs", "topk_prompt_logprobs"),
        (4, "int32", "prompt_cache_hit_tokens"),
    ],
}
#: Types of tensors by their number in the protocol.
_DTYPES: Mapping[int, type[np.generic]] = {1: np.float32, 2: np.int64, 3: np.int32}
_FLOAT32 = 1
_NO_LOGPROB = -99999.0
_STOP_REASONS = {StopReason.STOP: 0, StopReason.LENGTH: 1}


def _classes() -> dict[str, Any]:
    """Return a class of each message."""
    file = descriptor_pb2.FileDescriptorProto(name="roll_like_service.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, kind, field in fields:
            _add_field(message, number, kind, field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


def _add_field(message: Any, number: int, kind: str, name: str) -> None:
    label = _KINDS.LABEL_REPEATED if kind[0] == "[" or kind.startswith("map ") else _KINDS.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=label)
    if kind.startswith("map "):
        entry = message.nested_type.add(name="".join(map(str.capitalize, name.split("_"))) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "string", "key")
        _add_field(entry, 2, kind.removeprefix("map "), "value")
        field.type, field.type_name = _KINDS.TYPE_MESSAGE, f".{_PACKAGE}.{message.name}.{entry.name}"
        return
    kind = kind.strip("[]")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _KINDS.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


_CLASSES = _classes()


def read_train_request(body: bytes) -> TrainRequest:
    """Return what a client wants to be trained on.

    The data are read when they are asked for: a request with wrong ones still has its place in the model's order.

    Raises:
        RequestError: The body is no such message, so that not even its model is known.
    """
    message = _CLASSES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RequestError(
            f"the body of {len(body)} bytes is no ForwardBackwardRequest of the protocol: {error}",
            fix="send the request again; if it was not cut short on its way, use tinker 0.38",
        ) from error
    return TrainRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss=message.loss_fn,
        settings={name: value.text or value.number for name, value in message.loss_fn_config_v2.items()},
        forward_only=message.forward_only,
        read=lambda: [_datum(number, each) for number, each in enumerate(message.data)],
    )


def _datum(number: int, message: Any) -> Datum:
    parts = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise RequestError(f"datum {number} has an image or sound; this service takes text tokens only")
        parts.append(_array(chunk.encoded_text.tokens, np.int32, f"the tokens of datum {number}"))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return Datum(
        tokens=tokens,
        inputs={name: _dense(f"{name} of datum {number}", each) for name, each in message.loss_fn_inputs.items()},
    )


def _array(data: bytes, dtype: type[np.generic], what: str) -> npt.NDArray[Any]:
    try:
        return np.frombuffer(data, dtype)
    except ValueError as error:
        raise RequestError(f"{what}: {len(data)} bytes are no {np.dtype(dtype).name} values") from error


def _dense(what: str, message: Any) -> npt.NDArray[Any]:
    """Return a tensor, zero where a sparse one says nothing."""
    dtype, shape = _DTYPES.get(message.dtype), tuple(message.shape)
    if dtype is None:
        raise RequestError(f"{what} has the type {message.dtype}; expected float32, int64 or int32")
    if not message.HasField("sparse_csr"):
        values = _array(message.dense, dtype, what)
        return _shaped(values, shape or values.shape, what)
    sparse = message.sparse_csr
    values = _array(sparse.values, dtype, what)
    starts, columns = _array(sparse.crow_indices, np.int64, what), _array(sparse.col_indices, np.int64, what)
    fits = (
        len(shape) == 2
        and len(starts) == shape[0] + 1
        and len(columns) == len(values)
        and starts[0] == 0
        and starts[-1] == len(values)
        and bool((np.diff(starts) >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not fits:
        raise RequestError(f"{what} is no sparse tensor of the shape {shape}: its indices do not fit")
    whole = np.zeros(shape, dtype)
    whole[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return whole


def _shaped(values: npt.NDArray[Any], shape: tuple[int, ...], what: str) -> npt.NDArray[Any]:
    if min(shape, default=0) < 0 or values.size != int(np.prod(shape)):
        raise RequestError(f"{what} has {values.size} values, and its shape is {shape}")
    return values.reshape(shape)


def written_outputs(outputs: Sequence[Mapping[str, TokenArray]], metrics: Mapping[str, float]) -> bytes:
    """Return what a loss told of each datum, and the metrics of the request, as the client reads them."""
    message = _CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    message.metrics.update(metrics)
    # arrays of one record have the same size of rows
    for _, alike in groupby(outputs, lambda output: {name: array.shape[1:] for name, array in output.items()}):
        group = list(alike)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(group))
        for name in group[0]:
            arrays = [np.ascontiguousarray(output[name], np.float32) for output in group]
            field = record.fields[name]
            field.data = b"".join(array.tobytes() for array in arrays)
            field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64).tobytes()
            field.dtype = _FLOAT32
            field.trailing_shape.extend(group[0][name].shape[1:])
    data: bytes = message.SerializeToString()
    return data


def written_samples(result: SampleResult) -> bytes:
    """Return samples as the client reads them."""
    message = _CLASSES["SampleResponse"](prompt_cache_hit_tokens=result.cached_prompt_tokens)
    message.sequences.extend(_sequences(result.samples))
    prompt = result.prompt
    if prompt is not None and prompt.logprobs is not None:
        message.prompt_logprobs = np.ascontiguousarray(prompt.logprobs, np.float32).tobytes()
    if prompt is not None and prompt.top is not None:
        message.topk_prompt_logprobs.CopyFrom(_top(prompt.top))
    data: bytes = message.SerializeToString()
    return data


def _sequences(samples: Sequence[SampledTokens]) -> Iterator[Any]:
    for sample in samples:
        yield _CLASSES["SampledSequence"](
            stop_reason=_STOP_REASONS[sample.stop_reason],
            tokens=np.ascontiguousarray(sample.token_ids, np.int32).tobytes(),
            logprobs=np.ascontiguousarray(sample.logprobs, np.float32).tobytes(),
            topk_sampled_logprobs=None if sample.top is None else _top(sample.top),
        )


def _top(top: TopLogprobs) -> Any:
    """Return the likeliest tokens; where one cannot be drawn the protocol has token 0 and −99999."""
    told = np.isfinite(top.logprobs)
    length, k = told.shape
    return _CLASSES["TopkLogprobs"](
        token_ids=np.where(told, top.token_ids, 0).astype(np.int32).tobytes(),
        logprobs=np.where(told, top.logprobs, _NO_LOGPROB).astype(np.float32).tobytes(),
        k=k,
        length=length,
    )
