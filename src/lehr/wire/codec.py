"""Values to bytes and back: msgpack, with numpy arrays and pydantic models as leaves.

Dataclasses, named tuples, containers, numbers, text, bytes and arrays travel; a type that is not plain
data (a path, an open file, a callable) is refused. Nothing is ever unpickled. A decoded array is
read-only: it shares the memory of the message wherever its alignment allows.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, cast, get_args, get_origin, overload

import msgspec
import numpy as np
from pydantic import BaseModel

from lehr.core.errors import LehrError
from lehr.wire.structure import structure

T = TypeVar("T")

_ARRAY = 1
_KINDS = frozenset("biuf")
_HEAD = struct.Struct("<4sB")


class CodecError(LehrError, ValueError):
    """A value that cannot be encoded, or bytes that do not hold what was asked for."""

    code = "codec"


def encode(value: Any) -> bytes:
    """Return ``value`` as bytes. Raises :class:`CodecError` naming what cannot travel."""
    try:
        return _ENCODER.encode(value)
    except (TypeError, OverflowError, msgspec.ValidationError, RecursionError) as error:
        raise CodecError(f"cannot encode a {type(value).__name__}: {error}") from error


@overload
def decode(data: bytes | memoryview, kind: type[T]) -> T: ...
@overload
def decode(data: bytes | memoryview, kind: Any = Any) -> Any: ...
def decode(data: bytes | memoryview, kind: Any = Any) -> Any:
    """Return the value in ``data``, checked against ``kind`` (a type or annotation).

    Raises :class:`CodecError` that names the field which does not fit.
    """
    try:
        return _decoder(kind)(data)
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise CodecError(f"cannot decode {len(data)} bytes as {name}: {error}") from error


def _pack_array(array: np.ndarray[Any, Any]) -> msgspec.msgpack.Ext:
    if array.dtype.kind not in _KINDS:
        raise TypeError(f"arrays of {array.dtype} do not travel; use numbers or booleans")
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).reshape(array.shape)
    head = _HEAD.pack(array.dtype.str.encode(), array.ndim) + struct.pack(f"<{array.ndim}Q", *array.shape)
    return msgspec.msgpack.Ext(_ARRAY, b"".join((head, array.reshape(-1).view(np.uint8).data)))


def _unpack_array(code: int, data: memoryview) -> np.ndarray[Any, Any]:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    if len(data) < _HEAD.size:
        raise ValueError("an array without a header")
    name, ndim = _HEAD.unpack_from(data)
    dtype = np.dtype(name.rstrip(b"\0").decode("ascii"))
    if dtype.kind not in _KINDS:
        raise ValueError(f"an array of {dtype}")
    start = _HEAD.size + 8 * ndim
    if len(data) < start:
        raise ValueError("an array with half a header")
    shape = struct.unpack_from(f"<{ndim}Q", data, _HEAD.size)
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise ValueError(f"{len(data) - start} bytes do not make an array of {dtype} with shape {shape}")
    array: np.ndarray[Any, Any] = np.frombuffer(data, dtype, offset=start).reshape(shape)
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return array


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _pack_array(cast("np.ndarray[Any, Any]", value))
    if isinstance(value, np.generic):
        return cast("Any", value).item()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="python")
    raise TypeError(f"objects of type {type(value).__name__} do not travel")


def _decode_other(kind: Any, value: Any) -> Any:
    origin = get_origin(kind) or kind
    if origin is np.ndarray:
        if not isinstance(value, np.ndarray):
            raise ValueError(f"expected an array, got {type(value).__name__}")
        array = cast("np.ndarray[Any, Any]", value)
        _check_dtype(array, kind)
        return array
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        return origin.model_validate(value)
    raise TypeError(f"{kind} is not a type that travels")


def _check_dtype(array: np.ndarray[Any, Any], kind: Any) -> None:
    for argument in get_args(kind):
        if get_origin(argument) is np.dtype:
            (scalar,) = get_args(argument)
            if isinstance(scalar, type) and array.dtype != np.dtype(scalar):
                raise ValueError(f"expected an array of {np.dtype(scalar)}, got {array.dtype}")


@lru_cache(maxsize=512)
def _decoder(kind: Any) -> Callable[[bytes | memoryview], Any]:
    try:
        return msgspec.msgpack.Decoder(kind, dec_hook=_decode_other, ext_hook=_unpack_array).decode
    except TypeError:  # a choice of several dataclasses, which msgspec leaves to us
        plain = msgspec.msgpack.Decoder(Any, ext_hook=_unpack_array)
        return lambda data: structure(kind, plain.decode(data), _leaf)


def _leaf(kind: Any, value: Any) -> Any:
    try:
        return msgspec.convert(value, kind, dec_hook=_decode_other)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_other)
