"""The compiled functions, by number format, for callers that hold tensors."""

from __future__ import annotations

import ctypes
import functools
import logging
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch

from lehr.engine.native.kernels.build import INSTALL, built, why_not

log = logging.getLogger(__name__)

ARGUMENTS = {
    "norm": (*[c_void_p] * 4, c_int64, c_int64, c_float),
    "gated": (c_void_p, c_void_p, c_int64, c_int64),
    "rotate": (*[c_void_p] * 8, *[c_int64] * 5, c_float),
    "attend": (*[c_void_p] * 4, *[c_int64] * 5),
    "rotate_int8": (*[c_void_p] * 8, *[c_int64] * 5, c_float),
    "attend_int8": (*[c_void_p] * 4, *[c_int64] * 5),
    "widen_int8": (c_void_p, c_void_p, *[c_int64] * 5),
    "attend_split": (*[c_void_p] * 4, *[c_int64] * 5),
    "attend_alone": (*[c_void_p] * 4, *[c_int64] * 5),
    "attend_alone_int8": (*[c_void_p] * 4, *[c_int64] * 5),
    "attend_sparse": (*[c_void_p] * 5, *[c_int64] * 9),
    "choose": (*[c_void_p] * 4, *[c_int64] * 7),
    "norm_back": (*[c_void_p] * 6, c_int64, c_int64, c_float),
    "gated_back": (*[c_void_p] * 3, c_int64, c_int64),
    "int8_rows": (*[c_void_p] * 5, c_int64, c_int64, c_int64),
    "int8_rows_wide": (*[c_void_p] * 5, c_int64, c_int64, c_int64),
    "panels": (*[c_void_p] * 4, c_int64, c_int64, c_int64),
    "panels_wide": (*[c_void_p] * 4, c_int64, c_int64, c_int64),
}
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Kernels:
    """The compiled functions for one number format. They work on memory by address: see the ``.cpp`` files."""

    def __init__(self, library: ctypes.CDLL, suffix: str) -> None:
        for name, arguments in ARGUMENTS.items():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
            setattr(self, name, function)
        self.draw = library.draw
        self.draw.argtypes, self.draw.restype = (*[c_void_p] * 5, c_int64, c_int64), None
        library.panel_outputs.restype = library.panels_pay.restype = c_int64
        self.panel_outputs = int(library.panel_outputs())
        self.panels_pay = bool(library.panels_pay())

    norm: Any
    gated: Any
    rotate: Any
    attend: Any
    rotate_int8: Any
    attend_int8: Any
    widen_int8: Any
    attend_split: Any
    attend_alone: Any
    attend_alone_int8: Any
    attend_sparse: Any
    choose: Any
    norm_back: Any
    gated_back: Any
    int8_rows: Any
    int8_rows_wide: Any
    panels: Any
    panels_wide: Any


def kernels_for(dtype: torch.dtype) -> Kernels | None:
    """Return the kernels for a dtype, or None where they cannot be had, which is logged once."""
    library = _library()
    return Kernels(library, DTYPES[dtype]) if library is not None and dtype in DTYPES else None


class SpanKernels:
    """Attention over packed spans in bfloat16 with the processor's matrix registers, forwards and backwards."""

    attend_spans: Any
    attend_spans_back: Any

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, pointers in (("attend_spans", 7), ("attend_spans_back", 11)):
            function = getattr(library, name)
            function.argtypes, function.restype = (*[c_void_p] * pointers, c_int64, c_void_p), None
            setattr(self, name, function)


@functools.cache
def span_kernels() -> SpanKernels | None:
    """Return the kernels of attention over spans, or None where there are none or no matrix registers."""
    library = _library()
    if library is None:
        return None
    library.can_attend_spans.restype = c_int64
    return SpanKernels(library) if library.can_attend_spans() else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    why = why_not()
    if why:
        log.warning("The engine samples at about half its speed: no kernels, %s. %s", why, INSTALL)
        return None
    return ctypes.CDLL(str(built()))
