"""Triton kernels of the CUDA back end. Each has a plain function that checks shapes and launches it.

Triton's interpreter runs them on the CPU (TRITON_INTERPRET=1), which is how they are tested without a GPU. Kernels know
nothing of models, batches or caches beyond the tensors they are given.
"""

from plaudit.core.kernels.attention import (
    decode_attention,
    query_tiles,
    rotate_and_store,
    store_decoded,
    varlen_attention,
)
from plaudit.core.kernels.experts import (
    Routes,
    combined,
    expert_product,
    routes,
    softmax_top,
    weight_gradient,
)
from plaudit.core.kernels.latent import heads_product, latent_attention, latent_tiles
from plaudit.core.kernels.pointwise import (
    add_rms_norm,
    rms_norm,
    rms_norm_backward,
    rms_norm_both,
    rotary,
    rotate,
    silu_mul,
    silu_mul_backward,
)
from plaudit.core.kernels.recurrent import convolution, convolution_step, delta_rule, state_space
from plaudit.core.kernels.sampling import sample
from plaudit.core.kernels.truncation import Truncation

__all__ = [
    "Routes",
    "Truncation",
    "add_rms_norm",
    "combined",
    "convolution",
    "convolution_step",
    "decode_attention",
    "delta_rule",
    "expert_product",
    "heads_product",
    "latent_attention",
    "latent_tiles",
    "query_tiles",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_both",
    "rotary",
    "rotate",
    "rotate_and_store",
    "routes",
    "sample",
    "silu_mul",
    "silu_mul_backward",
    "softmax_top",
    "state_space",
    "store_decoded",
    "varlen_attention",
    "weight_gradient",
]
