"""Random words for dropout: which units are 0."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(h):
    """Map 32 bits to 32 bits, one to one. Each input bit flips each bit of the result half the time."""
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def draw(start, threshold, WORDS: tl.constexpr):
    """Return words of 32 bits that are 1 with the probability threshold/2¹⁶, from a start value for each.

    If a bit is 1 with probability p, then `bit | fair` is with (1 + p)/2, and `bit & fair` with p/2. So each step puts
    one binary digit in front of the probability: the digits of the threshold, from the last 1 to the first. WORDS is
    the number of these digits, see `word_count`.
    """
    drawn = start ^ start
    h = (start ^ (start >> 16)) * 0x7FEB352D
    for k in tl.static_range(WORDS):
        h = (h ^ (h >> 15)) * 0x846CA68B  # the first `fair` is mix(start)
        fair = h ^ (h >> 16)
        digit = 0 - ((threshold.to(tl.uint32) >> (16 - WORDS + k)) & 1)
        drawn = (drawn & fair) | (digit & (drawn | fair))
    return drawn


@triton.jit
def dropped(seed, rows, c, threshold, WORDS: tl.constexpr):
    """Return whether dropout sets the unit of each place (rows, c) to 0, from a seed of two words.

    Rows and columns are hashed apart and then together. Philox would take longer than the rest of the layer. A word
    serves 32 of 128 columns: those of a thread that holds a result of the matrix units.
    """
    low = tl.load(seed).to(tl.uint32)
    high = tl.load(seed + 1).to(tl.uint32)
    by_row = mix(mix(rows.to(tl.uint32) ^ low) ^ high)
    by_column = mix(mix((c // 128 * 4 + c // 2 % 4).to(tl.uint32) ^ high) ^ low)
    word = draw(by_row[:, None] + by_column[None, :], threshold, WORDS)
    return (word >> (c % 128 // 8 * 2 + c % 2)[None, :]) & 1 != 0


def threshold_and_scale(dropout: float) -> tuple[int, float]:
    """Return how many of 2¹⁶ equally likely draws are dropped, and the factor for the other units."""
    threshold = min(round(dropout * 2**16), 2**16 - 1)
    return threshold, 2**16 / (2**16 - threshold)


def word_count(dropout: float) -> int:
    """Return how many random words `draw` takes: the binary digits of the threshold up to the last 1."""
    threshold = threshold_and_scale(dropout)[0] | 2**16
    return 17 - (threshold & -threshold).bit_length()
