"""What tensor cores make of float32 factors, in tl.dot and cuBLAS: cut (rz), rounded away (rna) or to even (rne).

    python benchmarks/tf32.py       # needs an NVIDIA GPU

Printed is the largest difference from the float64 product of factors so treated.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    a = tl.load(a_ptr + m * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n)
    tl.store(c_ptr + m * N + n, tl.dot(a, b, input_precision="tf32"))


def treated(x: torch.Tensor, how: str) -> torch.Tensor:
    """float32 with 13 bits of mantissa less, as float64."""
    bits = x.view(torch.int32)
    bits = bits + {"rz": 0, "rna": 0x1000, "rne": 0xFFF + ((bits >> 13) & 1)}[how]
    return (bits & ~0x1FFF).view(torch.float32).double()


def differences(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> str:
    """Largest difference of c from a @ b, by how the factors are treated."""
    off = {how: float((c.double() - treated(a, how) @ treated(b, how)).abs().max()) for how in ("rz", "rna", "rne")}
    return ", ".join(f"{how} {worst:.2e}" for how, worst in off.items())


def main() -> None:
    """A line for each shape, and which instruction multiplied."""
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    for m, n, k, warps in ((16, 16, 16, 4), (16, 16, 32, 4), (64, 64, 32, 4), (64, 64, 64, 4), (128, 64, 64, 8)):
        a, b = torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")
        c = torch.empty(m, n, device="cuda")
        ptx = dot_kernel[(1,)](a, b, c, M=m, N=n, K=k, num_warps=warps).asm["ptx"]
        words = [word for word in ("mma.sync", "wgmma", "cvt.rna.tf32") if word in ptx]
        print(f"tl.dot {m}x{n}x{k} ({', '.join(words)}): {differences(a, b, c)}")
    torch.backends.cuda.matmul.allow_tf32 = True
    a, b = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    print(f"torch.matmul 256x256x256: {differences(a, b, a @ b)}")


if __name__ == "__main__":
    main()
