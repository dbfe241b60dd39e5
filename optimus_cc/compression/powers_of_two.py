"""Scales that are powers of two: multiplying by one rounds nothing. Exact on every device, unlike exp2 and log2."""

from __future__ import annotations

import torch

LOWEST, HIGHEST = -126, 127
"""Exponents of the powers of two that are normal numbers of fp32."""


def exponent(values: torch.Tensor) -> torch.Tensor:
    """floor(log2) of fp32 values that are not negative, int32: -127 of zero and subnormal ones, 128 of inf and NaN."""
    return (values.contiguous().view(torch.int32) >> 23) - 127


def power(exponents: torch.Tensor) -> torch.Tensor:
    """2 to the int32 ``exponents``, from :data:`LOWEST` to :data:`HIGHEST`, in fp32."""
    return ((exponents + 127) << 23).view(torch.float32)
