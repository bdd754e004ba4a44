"""The engine's matrix products, whichever library computes them, and the memory of the matrices."""

import subprocess
import sys

import pytest
import torch

from asyncspec.engine import matrix, memory
from asyncspec.engine.workspace import Buffer, LayerShape, Workspace


def test_tensors_in_huge_pages_behave_like_others():
    zeros = memory.zeros(3, 400_000, dtype=torch.bfloat16, device="cpu")
    assert (
        zeros.data_ptr() % memory.HUGE == 0
        and not zeros.any()
        and zeros.shape == (3, 400_000)
        and zeros.is_contiguous()
    )
    arena = memory.Arena()
    # the third tensor fills a chunk
    tensors = [
        torch.randn(5, 7),
        torch.randn(300, 2).t(),
        torch.arange(memory.CHUNK // 8),
        torch.randn(3, dtype=torch.float64),
    ]
    for _ in range(2):
        arena.clear()
        kept = [arena.keep(tensor) for tensor in tensors]
        assert all(
            torch.equal(k, t) and k.is_contiguous() and k.data_ptr() % memory.ALIGNED == 0
            for k, t in zip(kept, tensors)
        )
        places = [k.data_ptr() for k in kept]
    arena.clear()
    assert [arena.keep(tensor).data_ptr() for tensor in tensors] == places  # the same memory


def test_derived_tensors_keep_their_memory_without_huge_pages():
    arena, parameter = memory.Arena(), torch.randn(4, 4)
    first = [arena._keep_elsewhere(tensor) for tensor in (parameter, parameter * 2)]
    parameter.mul_(3)
    arena.clear()
    second = [arena._keep_elsewhere(tensor) for tensor in (parameter, parameter * 2)]
    assert first[0] is second[0] is parameter and first[1] is second[1]  # a weight itself is not copied
    assert torch.equal(second[1], parameter * 2)


PRODUCTS = """
import torch
from asyncspec.actors.base import resource_usage
from asyncspec.config import load
from asyncspec.engine.matrix import Derived
from asyncspec.actors.engines import make_engine

make_engine(load("tiny"), "cpu")
product, x = Derived().matrix(torch.ones(512, 512)), torch.ones(500, 512)
for rows in range(100, 500):
    product(x[:rows])
    if rows == 199:
        before = resource_usage()["mb"]
print(resource_usage()["mb"] - before)
"""


@pytest.mark.skipif(not matrix.slowed_by_mkl("cpu"), reason="oneDNN multiplies on AMD processors with AVX-512 only")
def test_the_memory_that_onednn_keeps_is_bounded():
    done = subprocess.run([sys.executable, "-c", PRODUCTS], capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) < 100  # MB, for 300 further shapes; by default they take 200


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_a_product_does_not_depend_on_the_library_that_multiplies(monkeypatch):
    monkeypatch.setattr(matrix, "slowed_by_mkl", lambda device: True)
    # with 41 tokens or more in pieces; the last product is large
    for tokens, inputs, outputs in ((1, 64, 384), (16, 64, 384), (41, 64, 384), (300, 64, 384), (3, 512, 768)):
        weight_OI, x_TI, rest_TO = (
            torch.randn(outputs, inputs),
            torch.randn(tokens, inputs),
            torch.randn(tokens, outputs),
        )
        with torch.inference_mode():
            product = matrix.Derived().matrix(weight_OI)
            torch.testing.assert_close(product(x_TI), x_TI @ weight_OI.T, atol=1e-4, rtol=1e-4)
            shape = LayerShape(outputs, 1, 1, 16, 0, 1e-6, False)
            space = Workspace(shape, tokens, 1, torch.float32, "cpu")
            product.write(Buffer.of(x_TI), space.x)
            torch.testing.assert_close(space.x.tensor, x_TI @ weight_OI.T, atol=1e-4, rtol=1e-4)
            space.x.tensor.copy_(rest_TO)
            product.add(Buffer.of(x_TI), space)
            torch.testing.assert_close(space.x.tensor, rest_TO + x_TI @ weight_OI.T, atol=1e-4, rtol=1e-4)
