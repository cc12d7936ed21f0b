"""The structures of ``csrc/api.h`` as ctypes sees them, field by field.

``csrc/api.h`` says what each field means.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any


class Format(ctypes.Structure):
    """``struct minifloat_format``."""

    _fields_ = [
        ("bits", ctypes.c_int32),
        ("mantissa_bits", ctypes.c_int32),
        ("emin", ctypes.c_int32),
        ("max", ctypes.c_float),
    ]


class QuantizeRowsArgs(ctypes.Structure):
    """``struct minifloat_quantize_rows_args``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),
        ("block_cols", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("scaling", ctypes.c_int32),
        ("element", Format),
        ("scale", Format),
        ("divisor", ctypes.c_float),
        ("zero_scale", ctypes.c_float),
        ("one_scale", ctypes.c_int32),
        ("tensor_amax", ctypes.c_float),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("signal", ctypes.c_double),
        ("noise", ctypes.c_double),
        ("saturated", ctypes.c_int64),
        ("flushed", ctypes.c_int64),
        ("nonfinite", ctypes.c_int64),
    ]


class RoundInputsArgs(ctypes.Structure):
    """``struct minifloat_round_inputs_args``."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("block_cols", ctypes.c_int64),
        ("element", Format),
        ("dtype", ctypes.c_int32),
        ("scaling", ctypes.c_int32),
        ("zero_scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
    ]


class AmaxArgs(ctypes.Structure):
    """``struct minifloat_amax_args``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("amax", ctypes.c_float),
        ("nonfinite", ctypes.c_int64),
    ]


class HistogramArgs(ctypes.Structure):
    """``struct minifloat_histogram_args``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("bins", ctypes.c_void_p),
    ]


class RoundWithFeedbackArgs(ctypes.Structure):
    """``struct minifloat_round_with_feedback_args``."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("group_of", ctypes.c_void_p),
        ("feedback", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("element", Format),
        ("threads", ctypes.c_int32),
    ]


class GramArgs(ctypes.Structure):
    """``struct minifloat_gram_args``."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("x_cols", ctypes.c_int64),
        ("y_cols", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("symmetric", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


class PackArgs(ctypes.Structure):
    """``struct minifloat_pack_args``."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),
        ("block_cols", ctypes.c_int64),
        ("element", ctypes.c_int32),
        ("grid", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("packed", ctypes.c_void_p),
    ]


class LinearArgs(ctypes.Structure):
    """``struct minifloat_linear_args``."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("m", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("int8_inputs", ctypes.c_int32),
        ("batch_invariant", ctypes.c_int32),
    ]


class MoeArgs(ctypes.Structure):
    """``struct minifloat_moe_args``."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("x_rows", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("experts", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("int8_inputs", ctypes.c_int32),
        ("batch_invariant", ctypes.c_int32),
    ]


class ProductArgs(ctypes.Structure):
    """``struct minifloat_product``."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
    ]


class NormArgs(ctypes.Structure):
    """``struct minifloat_norm``."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("centered", ctypes.c_int32),
    ]


class RotaryArgs(ctypes.Structure):
    """``struct minifloat_rotary``."""

    _fields_ = [
        ("inv_freq", ctypes.c_void_p),
        ("rotary", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
        ("scaling", ctypes.c_float),
    ]


class ActivationArgs(ctypes.Structure):
    """``struct minifloat_activation``."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("gated", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
    ]


class ExpertProductArgs(ctypes.Structure):
    """``struct minifloat_expert_product``."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("bias_dtype", ctypes.c_int32),
    ]


class RouterArgs(ctypes.Structure):
    """``struct minifloat_router``."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("correction", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("experts", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("groups_kept", ctypes.c_int32),
        ("group_best", ctypes.c_int32),
        ("normalize", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("scales", ctypes.c_void_p),
    ]


class ExpertNormsArgs(ctypes.Structure):
    """``struct minifloat_expert_norms``."""

    _fields_ = [
        ("router", NormArgs),
        ("input", NormArgs),
        ("experts", NormArgs),
        ("mlp", NormArgs),
    ]


class ExpertsArgs(ctypes.Structure):
    """``struct minifloat_experts``."""

    _fields_ = [
        ("router", RouterArgs),
        ("gate", ExpertProductArgs),
        ("up", ExpertProductArgs),
        ("down", ExpertProductArgs),
        ("activation", ActivationArgs),
        ("shared_gate", ctypes.c_void_p),
        ("norms", ctypes.c_void_p),
        ("intermediate", ctypes.c_int64),
    ]


class LatentArgs(ctypes.Structure):
    """``struct minifloat_latent``."""

    _fields_ = [
        ("q_norm", NormArgs),
        ("kv_norm", NormArgs),
        ("q_up", ProductArgs),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_factors", ctypes.c_void_p),
        ("q_rank", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("plain", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
    ]


class AttentionArgs(ctypes.Structure):
    """``struct minifloat_attention``."""

    _fields_ = [
        ("qkv", ProductArgs),
        ("out", ProductArgs),
        ("q_norm", NormArgs),
        ("k_norm", NormArgs),
        ("v_norm", NormArgs),
        ("sinks", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("cache_before", ctypes.c_int64),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("rotary", ctypes.c_int32),
        ("whole_norms", ctypes.c_int32),
        ("head_weights", ctypes.c_int32),
        ("values", ctypes.c_int32),
        ("gated", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("score_cap", ctypes.c_float),
        ("clip", ctypes.c_float),
        ("k_scale", ctypes.c_float),
        ("v_scale", ctypes.c_float),
        ("latent", ctypes.c_void_p),
    ]


class DeltaArgs(ctypes.Structure):
    """``struct minifloat_delta``."""

    _fields_ = [
        ("qkvz", ProductArgs),
        ("ba", ProductArgs),
        ("out", ProductArgs),
        ("conv", ctypes.c_void_p),
        ("decay", ctypes.c_void_p),
        ("dt_bias", ctypes.c_void_p),
        ("norm", NormArgs),
        ("state_before", ctypes.c_int64),
        ("k_heads", ctypes.c_int32),
        ("v_heads", ctypes.c_int32),
        ("k_dim", ctypes.c_int32),
        ("v_dim", ctypes.c_int32),
        ("conv_width", ctypes.c_int32),
        ("grouped", ctypes.c_int32),
    ]


class MlpArgs(ctypes.Structure):
    """``struct minifloat_mlp``."""

    _fields_ = [
        ("gate_up", ProductArgs),
        ("down", ProductArgs),
        ("activation", ActivationArgs),
        ("intermediate", ctypes.c_int64),
    ]


class LayerInputArgs(ctypes.Structure):
    """``struct minifloat_layer_input``."""

    _fields_ = [
        ("gate", ProductArgs),
        ("out", ProductArgs),
        ("norm", NormArgs),
        ("activation", ActivationArgs),
    ]


class LayerInputsArgs(ctypes.Structure):
    """``struct minifloat_layer_inputs``."""

    _fields_ = [
        ("projection", ProductArgs),
        ("norm", NormArgs),
        ("table", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("table_dtype", ctypes.c_int32),
        ("table_factor", ctypes.c_float),
        ("factor", ctypes.c_float),
    ]


class LayerArgs(ctypes.Structure):
    """``struct minifloat_layer``."""

    _fields_ = [
        ("input_norm", NormArgs),
        ("attention_norm", NormArgs),
        ("mlp_norm", NormArgs),
        ("result_norm", NormArgs),
        ("attention", AttentionArgs),
        ("delta", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("mlp", MlpArgs),
        ("input", ctypes.c_void_p),
        ("parallel", ctypes.c_int32),
        ("residual_factor", ctypes.c_float),
        ("scalar", ctypes.c_float),
    ]


class DecoderArgs(ctypes.Structure):
    """``struct minifloat_decoder``."""

    _fields_ = [
        ("layers", ctypes.c_void_p),
        ("rotaries", ctypes.c_void_p),
        ("norm", NormArgs),
        ("embedding", ctypes.c_void_p),
        ("inputs", ctypes.c_void_p),
        ("lm_head", ProductArgs),
        ("hidden", ctypes.c_int64),
        ("lm_head_rows", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("embedding_dtype", ctypes.c_int32),
        ("layer_count", ctypes.c_int32),
        ("rotary_count", ctypes.c_int32),
        ("embedding_factor", ctypes.c_float),
        ("logits_factor", ctypes.c_float),
        ("logits_cap", ctypes.c_float),
        ("int8_inputs", ctypes.c_int32),
        ("batch_invariant", ctypes.c_int32),
    ]


class StepArgs(ctypes.Structure):
    """``struct minifloat_step_args``."""

    _fields_ = [
        ("decoder", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("contexts", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("logit_rows", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("nanoseconds", ctypes.c_void_p),
        ("cache_blocks", ctypes.c_int64),
        ("state_floats", ctypes.c_int64),
        ("cache_element", ctypes.c_int32),
        ("token_count", ctypes.c_int32),
        ("sequences", ctypes.c_int32),
        ("block_columns", ctypes.c_int32),
        ("logit_count", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


class ReadArgs(ctypes.Structure):
    """``struct minifloat_read_args``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("threads", ctypes.c_int32),
        ("sum", ctypes.c_uint64),
    ]


def struct_of(structure: type[ctypes.Structure]) -> struct.Struct:
    """Return the packer of a structure's bytes: packing is faster than creating the ctypes object."""
    kinds: list[Any] = [field[1] for field in structure._fields_]
    packer = struct.Struct("@" + "".join(kind._type_ for kind in kinds) + "0q")  # with the padding at the end
    assert packer.size == ctypes.sizeof(structure), "the fields have the sizes and the alignment of ctypes"
    return packer
