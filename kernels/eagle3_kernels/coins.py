"""Coins of seeded requests: a function of (seed, position), on any device.

A position has one coin, whatever node of whatever tree stands there.  With
:func:`eagle3_kernels.verify_sample`, where a token is a function of its coin and the logits, a seeded
request therefore gives the same tokens with any draft, any tree and any batch around it.

The generator is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014),
its state reached directly: mix(mix(seed) + position * gamma).
"""

from __future__ import annotations

import torch

from .checks import DEVICES, expect, same_device

GAMMA = -0x61C8864680B583EB  # 2^64 divided by the golden ratio, as a signed number
FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of the mix, signed
BITS = 53  # of a float64 between 0 and 1


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of int64; torch's own repeats the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shifted(z, 30)) * FACTORS[0]
    z = (z ^ _shifted(z, 27)) * FACTORS[1]
    return z ^ _shifted(z, 31)


def seeded_coins(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1), in steps of 2^-53.

    Args:
        seeds: [B] int64, any value.
        positions: [B, N] int64, any value.

    Returns:
        [B, N] float64.

    Example:
        >>> a = seeded_coins(torch.tensor([7, 7]), torch.tensor([[3, 4], [4, 3]]))
        >>> bool(a[0, 0] == a[1, 1]), bool(a[0, 0] == a[0, 1])
        (True, False)
    """
    expect("seeds", seeds, dtypes=(torch.int64,), shape=(None,), devices=DEVICES)
    expect("positions", positions, dtypes=(torch.int64,), shape=(seeds.shape[0], None), devices=DEVICES)
    same_device(seeds=seeds, positions=positions)
    state = _mix(seeds).unsqueeze(1) + positions * GAMMA
    return _shifted(_mix(state), 64 - BITS).double() * 2.0**-BITS
