"""A model with parameters of many sorts, and bits that flip in their memory past torch."""

import ctypes

import torch
from torch import Tensor, nn

BITS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}
"""Unsigned numbers by their bytes."""


class Layer(nn.Module):
    """Parameters as a quantized layer has them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)

        def some(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        def fixed(data: Tensor) -> nn.Parameter:
            return nn.Parameter(data, requires_grad=False)

        self.norm = fixed(some(129))
        self.bf16 = fixed(some(96, 130).bfloat16())
        self.fp32 = fixed(some(300, 128))
        self.int8 = fixed((some(127, 33) * 40).to(torch.int8))
        self.fp8 = fixed(some(64, 48).to(torch.float8_e4m3fn))
        self.transposed = fixed(some(40, 70).half().t())
        self.scale = fixed(torch.tensor(0.125))
        self.register_buffer("bias", some(200))
        self.register_buffer("cache", some(50), persistent=False)


class Model(nn.Module):
    """Four layers, an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(90, 64)
        self.layers = nn.ModuleList(Layer(seed) for seed in range(4))
        self.head = nn.Linear(64, 90, bias=False)
        self.head.weight = self.embedding.weight

    def large(self) -> dict[str, Tensor]:
        """Parameters of more than a few elements, tied ones once."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.numel() > 1}


def flip(tensor: Tensor, element: int, bit: int) -> tuple[int, int]:
    """Flips a bit of memory past torch; gives the element's bits before and after. ``element``: by its place in
    memory."""
    size = tensor.element_size()
    memory = BITS[size].from_address(tensor.data_ptr() + element * size)
    before = memory.value
    memory.value = before ^ 1 << bit
    return before, memory.value
