"""Drafting on a CPU in one function that numba compiles.

The function makes a whole proposal of EAGLE-3 or MTP: it processes the positions that each row has missed, then does
all passes of the draft. A draft is a single layer, and each of its passes waits for the one before. Launched one by
one, a pass over few rows is thirty operations that cost what launching them costs. Hence one function: numba compiles
it when it is first called and keeps the result on disk. Its matrix products are BLAS calls. On GPUs, graphs serve the
same purpose (engine/graphs.py). A proposal comes with the distributions it was drawn from and is verified against those
very distributions, whatever computed them.

Shape suffixes: B rows, K draft length, N positions to process, D model dimension, E fused features, I = 2D inputs, V
vocabulary, U the draft's own vocabulary; G key-value groups, R = queries of a group, then its key, then its value; H
head size, W = G * R * H, A attended, F hidden dimension, S slots, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import scipy.linalg.cython_blas  # noqa: F401  numba uses its BLAS; imported here so that `use_threads` finds it
from numba import njit

_FUNCTIONS: list[Callable] = []  # every function that numba compiles here
ALL = np.empty(0, np.int64)  # the `at_T` of `store` when no position is left out
_1, _0 = np.float32(1.0), np.float32(0.0)
# exp(x) = 2^n * exp(r), |r| <= ln(2) / 2, n = round(x / ln 2); ln 2 in two parts (Cody and Waite, 1980), exp(r) by its
# Taylor series to r^7.
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to an integer
_LEAST = np.float32(-87.0)
_T2, _T3, _T4, _T5, _T6, _T7 = (np.float32(1 / math.factorial(n)) for n in range(2, 8))


class Weights(NamedTuple):
    """A draft's weights: float32 matrices as (inputs, outputs).

    A matrix that the draft does not have is empty. engine/layers.py says which factors the matrices include.
    """

    embedding_VD: np.ndarray
    wqkv: np.ndarray  # EAGLE-3: [I, W]; MTP: [D, W]
    wo_AD: np.ndarray
    inward_DF: np.ndarray  # [D, 2F]
    outward_FD: np.ndarray
    head_DU: np.ndarray
    turn_PH2: np.ndarray  # RoPE: cosine and sine for each position and each pair in a head, [P, H / 2, 2]
    token_U: np.ndarray  # int64, the tokens that the draft can propose
    fuse_ED: np.ndarray = np.empty((0, 0), np.float32)  # EAGLE-3: fuses the features of the target's layers into x
    join_ID: np.ndarray = np.empty((0, 0), np.float32)  # MTP: joins both inputs
    inverse_RH: np.ndarray = np.empty((0, 0), np.float32)  # head norms: `HeadNorm.inverse_RH`, [R - 1, H]
    norm_D: np.ndarray = np.empty(0, np.float32)  # MTP: norm of the hidden state that the next pass takes
    bias_W: np.ndarray = np.empty(0, np.float32)  # MTP without head norms: what is added to the heads


class State(NamedTuple):
    """The state of the rows. `propose` and `read` write only to the cache, `key_SGHP` and `value_SGPH`."""

    token_SP: np.ndarray  # int64
    length_S: np.ndarray  # int64
    cached_S: np.ndarray  # int64, positions below this are in the cache
    feature_SPE: np.ndarray
    key_SGHP: np.ndarray
    value_SGPH: np.ndarray


@cache
def prepare() -> None:
    """Compile everything that a proposal needs, in about ten seconds, or load it from disk if that was done before."""
    try:
        _rehearse()
    except Exception:  # the result on disk is damaged
        for function in _FUNCTIONS:
            function.recompile()  # discards it
        _rehearse()


def _rehearse() -> None:
    """Call every function once, on rows of zeros."""

    def zeros(*size: int) -> np.ndarray:
        return np.zeros(size, np.float32)

    one, none = np.float32(1.0), np.zeros(1, np.int64)
    sizes = ((8, 8), (16, 32), (16, 8), (8, 16), (8, 8), (8, 8), (9, 4, 2))
    weights = Weights(*(zeros(*size) for size in sizes), token_U=np.arange(8))
    state = State(np.zeros((1, 9), np.int64), np.full(1, 3), none, zeros(1, 9, 8), zeros(1, 1, 8, 9), zeros(1, 1, 9, 8))
    propose(weights, state, zeros(1, 1), one, one)
    read(weights, state, 0, none, one)
    copy(state, none, none)
    for parts in (1, 3):  # MTP has one layer of features, EAGLE-3 three
        store(zeros(1, 9, 8 * parts), (zeros(1, 8),) * parts, 0, np.zeros((1, 1), np.int64), ALL)


def _numba(**options) -> Callable:
    """Decorate with numba's njit, and keep the compiled function on disk if some directory is writable."""

    def decorate(function: Callable) -> Callable:
        try:
            made = njit(cache=True, **options)(function)
        except RuntimeError:  # neither the source's directory nor the user's cache directory is writable
            made = njit(**options)(function)
        _FUNCTIONS.append(made)
        return made

    return decorate


_FAST = {"reassoc", "contract", "arcp"}  # sums in any order; infinities and NaN keep their meaning


@_numba()
def _exp(x, bits, n):
    """x[:n] = exp(x[:n]), for x at most 0 or slightly above; `bits` is int32 scratch memory."""
    for i in range(n):
        v = max(x[i], _LEAST)
        t = (v * _LOG2E + _ROUND) - _ROUND
        r = (v - t * _LN2_HIGH) - t * _LN2_LOW
        x[i] = _1 + r * (_1 + r * (_T2 + r * (_T3 + r * (_T4 + r * (_T5 + r * (_T6 + r * _T7))))))
        bits[i] = (np.int32(t) + np.int32(127)) << np.int32(23)
    power = bits.view(np.float32)
    for i in range(n):
        x[i] *= power[i]


@_numba(fastmath=_FAST)
def _unit(x, start, out, eps):
    """out[start:] = x / sqrt(sum(x^2) + D * eps)."""
    total = np.float32(len(x)) * eps
    for i in range(len(x)):
        total += x[i] * x[i]
    by = _1 / math.sqrt(total)
    for i in range(len(x)):
        out[start + i] = x[i] * by


@_numba()
def _units(x_ND, eps):
    """Apply `_unit` to each row."""
    unit_ND = np.empty_like(x_ND)
    for n in range(len(x_ND)):
        _unit(x_ND[n], 0, unit_ND[n], eps)
    return unit_ND


@_numba(fastmath=_FAST)
def _heads(w, x_ND, token_N, eps):
    """Return the heads [N, W], not yet rotated, of N tokens and the hidden states x before them.

    For MTP, x becomes the input of the block: both inputs, joined.
    """
    N, D = x_ND.shape
    units_NI = np.empty((N, 2 * D), np.float32)
    for n in range(N):
        _unit(w.embedding_VD[token_N[n]], 0, units_NI[n], eps)
        _unit(x_ND[n], D, units_NI[n], eps)
    if not w.join_ID.size:
        return np.dot(units_NI, w.wqkv)
    np.dot(units_NI, w.join_ID, x_ND)
    if w.inverse_RH.size:
        return np.dot(x_ND, w.wqkv)
    heads_NW = np.dot(_units(x_ND, eps), w.wqkv)
    if w.bias_W.size:
        for n in range(N):
            for i in range(len(w.bias_W)):
                heads_NW[n, i] += w.bias_W[i]
    return heads_NW


@_numba(fastmath=_FAST)
def _write_kv(w, heads_W, x_D, position, key_GHP, value_GPH, eps):
    """Normalize and rotate the heads of one position, and write its keys and values to the cache."""
    (G, H, _), inverse_RH, turn_H2 = key_GHP.shape, w.inverse_RH, w.turn_PH2[position]
    R = len(heads_W) // (G * H)
    length = _0
    if inverse_RH.size:
        length = np.float32(len(x_D)) * eps
        for i in range(len(x_D)):
            length += x_D[i] * x_D[i]
    for g in range(G):
        for r in range(R):
            at = (g * R + r) * H
            if inverse_RH.size:
                total = length
                if r < R - 1:
                    total = length * (np.float32(H) * eps)
                    for h in range(H):
                        total += heads_W[at + h] * heads_W[at + h] * inverse_RH[r, h]
                by = _1 / math.sqrt(total)
                for h in range(H):
                    heads_W[at + h] *= by
            if r < R - 1:
                for i in range(H // 2):
                    real, imaginary = heads_W[at + 2 * i], heads_W[at + 2 * i + 1]
                    heads_W[at + 2 * i] = real * turn_H2[i, 0] - imaginary * turn_H2[i, 1]
                    heads_W[at + 2 * i + 1] = real * turn_H2[i, 1] + imaginary * turn_H2[i, 0]
        at = (g * R + R - 2) * H
        for h in range(H):
            key_GHP[g, h, position] = heads_W[at + h]
            value_GPH[g, position, h] = heads_W[at + H + h]


@_numba(fastmath=_FAST)
def _attend(heads_W, span, key_GHP, value_GPH, out_A, score_P, bits_P):
    """out = attention of one position's queries over the first `span` positions."""
    G, H, _ = key_GHP.shape
    R = len(heads_W) // (G * H)
    for g in range(G):
        for r in range(R - 2):
            at, to = (g * R + r) * H, (g * (R - 2) + r) * H
            for p in range(span):
                score_P[p] = _0
            for h in range(H):
                query, key_P = heads_W[at + h], key_GHP[g, h]
                for p in range(span):
                    score_P[p] += query * key_P[p]
            most = score_P[0]
            for p in range(1, span):
                most = max(most, score_P[p])
            for p in range(span):
                score_P[p] -= most
            _exp(score_P, bits_P, span)
            total = _0
            for p in range(span):
                total += score_P[p]
            by, out_H = _1 / total, out_A[to : to + H]
            for h in range(H):
                out_H[h] = _0
            for p in range(span):
                weight, value_H = score_P[p] * by, value_GPH[g, p]
                for h in range(H):
                    out_H[h] += weight * value_H[h]


@_numba(fastmath=_FAST)
def _mlp(w, x_ND, eps):
    """x += down(silu(gate(norm(x))) * up(norm(x)))."""
    N, F = len(x_ND), len(w.outward_FD)
    inward_NF, gate_NF = np.dot(_units(x_ND, eps), w.inward_DF), np.empty((N, F), np.float32)
    for n in range(N):
        for f in range(F):
            gate_NF[n, f] = -abs(inward_NF[n, f])
    _exp(gate_NF.reshape(-1), np.empty(N * F, np.int32), N * F)
    for n in range(N):
        for f in range(F):
            gate, e = inward_NF[n, f], gate_NF[n, f]
            gate_NF[n, f] = gate * (_1 if gate >= _0 else e) / (_1 + e) * inward_NF[n, F + f]
    x_ND += np.dot(gate_NF, w.outward_FD)


@_numba(fastmath=_FAST)
def _draw(logits_U, temperature, uniform, token_U, out_V, bits_U):
    """Draw a token by inverting the cumulative sum of its distribution, and return it.

    The distribution is written to out_V, which must be zero before.
    """
    U = len(logits_U)
    by, most, total = _1 / temperature, logits_U[0], _0
    for u in range(1, U):
        most = max(most, logits_U[u])
    for u in range(U):
        logits_U[u] = (logits_U[u] - most) * by
    _exp(logits_U, bits_U, U)
    for u in range(U):
        total += logits_U[u]
    by, whole, below, drawn = _1 / total, 0.0, 0.0, 0
    for u in range(U):
        logits_U[u] *= by
        whole += logits_U[u]
    for u in range(U):  # in float64, so that a number below 1 times the sum stays below the sum
        below += logits_U[u]
        if below > uniform * whole:
            drawn = u
            break
    for u in range(U):
        out_V[token_U[u]] = logits_U[u]
    return token_U[drawn]


@_numba()
def store(feature_SPE, parts, first_row, position_BL, at_T):
    """Write the features of these positions, part by part.

    Args:
        parts: features of each layer, [T, D].
        at_T: which of the B * L positions are given; empty for all.
    """
    L, D = position_BL.shape[1], parts[0].shape[1]
    for t in range(len(parts[0])):
        n = at_T[t] if at_T.size else t
        feature_E = feature_SPE[first_row + n // L, position_BL[n // L, n % L]]
        for i in range(len(parts)):
            feature_E[i * D : (i + 1) * D] = parts[i][t]


@_numba()
def copy(s, source_N, row_N):
    """Copy the cached keys and values and the features of each source to its row."""
    for n in range(len(row_N)):
        source, row = source_N[n], row_N[n]
        cached, length = s.cached_S[source], s.length_S[source]
        s.key_SGHP[row, :, :, :cached] = s.key_SGHP[source, :, :, :cached]
        s.value_SGPH[row, :, :cached] = s.value_SGPH[source, :, :cached]
        s.feature_SPE[row, :length] = s.feature_SPE[source, :length]  # all: passes launched one by one use some again


@_numba()
def read(w, s, first_row, end_B, eps):
    """Write keys and values of the positions before `end_B` that rows from `first_row` have not cached yet."""
    B = len(end_B)
    N = 0
    for b in range(B):
        N += max(0, end_B[b] - s.cached_S[first_row + b])
    if not N:
        return
    row_N, position_N, token_N = np.empty(N, np.int64), np.empty(N, np.int64), np.empty(N, np.int64)
    feature_NE = np.empty((N, s.feature_SPE.shape[2]), np.float32)
    n = 0
    for b in range(B):
        row = first_row + b
        for position in range(s.cached_S[row], end_B[b]):
            row_N[n], position_N[n], token_N[n] = row, position, s.token_SP[row, position + 1]
            feature_NE[n] = s.feature_SPE[row, position]
            n += 1
    x_ND = np.dot(feature_NE, w.fuse_ED) if w.fuse_ED.size else feature_NE
    heads_NW = _heads(w, x_ND, token_N, eps)
    for n in range(N):
        _write_kv(w, heads_NW[n], x_ND[n], position_N[n], s.key_SGHP[row_N[n]], s.value_SGPH[row_N[n]], eps)


@_numba()
def propose(w, s, uniform_BK, temperature, eps):
    """Return proposals for rows 0..B-1, int64 [B, K], and the distributions they were drawn from, float32 [B, K, V]."""
    B, K = uniform_BK.shape
    V, D = w.embedding_VD.shape
    P = s.key_SGHP.shape[3]
    read(w, s, 0, s.length_S[:B] - 2, eps)
    q_BKV, token_BK = np.zeros((B, K, V), np.float32), np.empty((B, K), np.int64)
    feature_BE, token_B = np.empty((B, s.feature_SPE.shape[2]), np.float32), np.empty(B, np.int64)
    for b in range(B):
        position = max(s.length_S[b] - 2, 0)
        feature_BE[b] = s.feature_SPE[b, position]
        token_B[b] = s.token_SP[b, position + 1]
    x_BD = np.dot(feature_BE, w.fuse_ED) if w.fuse_ED.size else feature_BE
    attended_BA, unit_BD = np.empty((B, len(w.wo_AD)), np.float32), np.empty((B, D), np.float32)
    score_P, bits = np.empty(P, np.float32), np.empty(max(P, w.head_DU.shape[1]), np.int32)
    for k in range(K):
        heads_BW = _heads(w, x_BD, token_B, eps)
        for b in range(B):
            position = max(s.length_S[b] - 2 + k, 0)
            _write_kv(w, heads_BW[b], x_BD[b], position, s.key_SGHP[b], s.value_SGPH[b], eps)
            _attend(heads_BW[b], position + 1, s.key_SGHP[b], s.value_SGPH[b], attended_BA[b], score_P, bits)
        x_BD += np.dot(attended_BA, w.wo_AD)
        _mlp(w, x_BD, eps)
        for b in range(B):
            _unit(x_BD[b], 0, unit_BD[b], eps)
            if w.norm_D.size:
                for d in range(D):
                    unit_BD[b, d] *= w.norm_D[d]
                    x_BD[b, d] = unit_BD[b, d]
        logits_BU = np.dot(unit_BD, w.head_DU)
        for b in range(B):
            token_B[b] = _draw(logits_BU[b], temperature, uniform_BK[b, k], w.token_U, q_BKV[b, k], bits)
            token_BK[b, k] = token_B[b]
    return token_BK, q_BKV
