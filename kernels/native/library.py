"""The C structs and functions as ctypes sees them, field for field what csrc/ declares; sizes are checked."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any, ClassVar


class Matrix(Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("data", c_void_p),
        ("scales", c_void_p),
        ("escapes", c_void_p),
        ("escape_starts", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("format", c_int32),
    ]


class Shape(Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("value_dim", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("sinks", c_void_p),
    ]


class Pages(Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("k", c_void_p),
        ("v", c_void_p),
        ("slab_stride", c_int64),
        ("page_stride", c_int64),
        ("per_slab", c_int32),
        ("page_tokens", c_int32),
    ]


class Rope(Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [("frequencies", c_void_p), ("dim", c_int32), ("scale", c_float)]


class Layer(Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("attention_norm", c_void_p),
        ("attention_post_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        ("qk_norm", c_void_p),
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("qkv_bias", c_void_p),
        ("output_bias", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("shape", Shape),
        ("pages", Pages),
        ("kind", c_int32),
        ("rope", c_int32),
        ("value_scale", c_float),
        ("activation", c_int32),
        ("limit", c_float),
        ("alpha", c_float),
        ("experts", c_int32),
        ("active", c_int32),
        ("router_kind", c_int32),
        ("normalize", c_int32),
        ("routed_scale", c_float),
        ("router", c_void_p),
        ("router_bias", c_void_p),
        ("expert_gate_up", POINTER(Matrix)),
        ("expert_down", POINTER(Matrix)),
        ("expert_gate_up_bias", c_void_p),
        ("expert_down_bias", c_void_p),
    ]


class Model(Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("hidden", c_int64),
        ("eps", c_float),
        ("embedding_scale", c_float),
        ("embedding", c_void_p),
        ("head", Matrix),
        ("final_norm", c_void_p),
        ("layers", POINTER(Layer)),
        ("ropes", POINTER(Rope)),
        ("layer_count", c_int32),
        ("rope_count", c_int32),
    ]


class Step(Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("tokens", c_int64),
        ("rows", c_int64),
        ("ids", c_void_p),
        ("slots", c_void_p),
        ("starts", c_void_p),
        ("counts", c_void_p),
        ("tables", c_void_p * 2),
        ("table_stride", c_int64 * 2),
        ("out", c_void_p),
        ("drops", c_void_p),
    ]


class Draw(Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("top_k", c_int64),
        ("key", c_uint64),
    ]


def load(path: Path) -> ctypes.CDLL:
    """The library with its functions' types set. Raises OSError if it cannot be loaded or is not this one."""
    library = ctypes.CDLL(str(path))
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "tp_struct_bytes": (c_int64, [c_int]),
        "tp_has_avx512": (c_int, []),
        "tp_has_bf12": (c_int, []),
        "tp_new": (c_void_p, [c_int]),
        "tp_threads": (c_int, [c_void_p]),
        "tp_take_bytes": (c_int64, [c_void_p]),
        "tp_interrupt": (None, [c_void_p]),
        "tp_quiet": (None, [c_void_p]),
        "tp_free": (None, [c_void_p]),
        "tp_forward": (c_int, [c_void_p, POINTER(Model), POINTER(Step)]),
        "tp_multiply": (c_int, [c_void_p, POINTER(Matrix), c_void_p, c_void_p, c_int64, c_void_p]),
        "tp_pack_bf12": (
            c_int64,
            [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64],
        ),
        "tp_choose": (c_int, [c_void_p, c_void_p, c_int64, c_int64, POINTER(Draw), c_void_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for index, struct in enumerate((Matrix, Layer, Rope, Model, Step, Draw)):
        if library.tp_struct_bytes(index) != ctypes.sizeof(struct):
            raise OSError(f"{path}: {struct.__name__} differs in size")
    return library
