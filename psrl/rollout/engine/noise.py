"""Sampling noise: one uniform number per (seed, position), the same whoever asks and whenever.

A request's stream does not depend on the batch it is in, on the replica, or on how often it was dispatched: position
counts the response's tokens from 0 over all dispatches. Computed on the host in one vectorised pass; positions are
known before a step.

    u(seed, position) = top 53 bits of mix(mix(seed + G) ^ mix(position + H)) / 2^53,   in [0, 1)

`mix` is the finaliser of SplitMix64 (a bijection of 64-bit words); G and H are odd constants that keep the two
inputs apart.
"""

import numpy as np
import numpy.typing as npt

_G = np.uint64(0x9E3779B97F4A7C15)
_H = np.uint64(0xD1B54A32D192ED03)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = (np.uint64(shift) for shift in (30, 27, 31, 11))

U64 = npt.NDArray[np.uint64]


def _mix(x: U64) -> U64:
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


def uniforms(seeds: U64, positions: U64) -> npt.NDArray[np.float64]:
    """float64 [B] in [0, 1) for uint64 [B] seeds and positions (arrays, so that overflow wraps without a warning)."""
    bits = _mix(_mix(seeds + _G) ^ _mix(positions + _H))
    return (bits >> _S11).astype(np.float64) * 2.0**-53
