"""seeded_coins against SplitMix64 in Python's own integers, and as random numbers."""

from __future__ import annotations

import itertools

import torch

from eagle3_kernels import seeded_coins

WORD = 2**64 - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def test_against_python() -> None:
    seeds = [0, 1, 42, -1, 2**63 - 1, -(2**63)]
    positions = [0, 1, 2, 131071, 2**40]
    got = seeded_coins(torch.tensor(seeds), torch.tensor([positions] * len(seeds)))
    for (i, seed), (j, position) in itertools.product(enumerate(seeds), enumerate(positions)):
        state = (mix(seed & WORD) + position * 0x9E3779B97F4A7C15) & WORD
        assert float(got[i, j]) == (mix(state) >> 11) * 2.0**-53


def test_the_first_outputs_of_splitmix64() -> None:
    """Of the published generator with seed 1234567, whose state grows by gamma before each output."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix((1234567 + i * 0x9E3779B97F4A7C15) & WORD) for i in (1, 2, 3)] == published


def test_uniform_and_unrelated() -> None:
    """Neighbouring seeds and neighbouring positions, which is what users and decoding take."""
    coins = seeded_coins(torch.arange(300), torch.arange(300).expand(300, -1).contiguous())
    assert bool((coins >= 0).all()) and bool((coins < 1).all())
    assert coins.unique().numel() == coins.numel()
    counts = torch.histc(coins, bins=50, min=0, max=1)
    expected = coins.numel() / 50
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert 15 < statistic < 110  # chi-square of 49 degrees: 49 with a deviation of 10
    for a, b in ((coins[:-1], coins[1:]), (coins[:, :-1], coins[:, 1:])):
        correlation = float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])
        assert abs(correlation) < 0.015  # 4.5 deviations


def test_a_coin_does_not_depend_on_its_neighbours() -> None:
    whole = seeded_coins(torch.tensor([5, 6]), torch.tensor([[1, 2], [9, 1]]))
    assert float(whole[1, 0]) == float(seeded_coins(torch.tensor([6]), torch.tensor([[9]])))
