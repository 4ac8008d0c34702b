"""Set-ups that blocks of the documentation ask for by name: `<!-- set-up: model -->` above a block of Python.

Each is Python that runs before the block, in the page's namespace and folder.
"""

_IMPORTS = """
import pytest, torch
import torch.nn.functional as F
import retrograd, retrograd as rg
"""

_MYLIB = '''
from pathlib import Path
Path("mylib.py").write_text("""
import torch

class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        wide = x.float()
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, w, rstd)
        return (wide * rstd * w.float()).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, rstd = ctx.saved_tensors
        x_hat, g = x.float() * rstd, dy.float() * w.float()
        dx = rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
        return dx.to(x.dtype), (dy.float() * x_hat).unsqueeze(0).flatten(0, -2).sum(0).to(w.dtype), None

def rms_norm(x, w, eps=1e-6):
    return RmsNorm.apply(x, w, eps)
""")
Path("mykernels.py").write_text(Path("mylib.py").read_text())
'''

_SHARDED = (
    _IMPORTS
    + """
import os, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
if not dist.is_initialized():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
    def forward(self, x):
        for block in self.blocks: x = block(x)
        return x
model = Net()
def train(model):
    model(torch.randn(2, 4)).sum().backward()
"""
)
_TRAIN_STEP = """
for block in model.blocks: fully_shard(block)
rank, batches = 0, [torch.randn(2, 4)] * 2
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def train_step(batch):
    model(batch).sum().backward()
    optimizer.step()
def train(steps):
    for batch in batches[:steps]: train_step(batch)
"""

SETUPS = {
    "imports": _IMPORTS,
    "mylib": _IMPORTS + _MYLIB,
    "spec": _IMPORTS + _MYLIB + '''
from mylib import rms_norm
reference = lambda x, w, eps=1e-6: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w
spec = rg.op(rms_norm, reference, dict(x=rg.tensor("M...", "N"), w=rg.tensor("N")), params=dict(eps=[1e-6]))
''',
    "gradients": _IMPORTS + _MYLIB + """
from mylib import rms_norm
reference = lambda x, w, eps=1e-6: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w
spec = rg.op(rms_norm, reference, dict(x=rg.tensor("M...", "N"), w=rg.tensor("N")), params=dict(eps=[1e-6]))
x, w = torch.randn(3, 5, requires_grad=True), torch.randn(5, requires_grad=True)
grad_out = torch.randn(3, 5)
dx, dw = torch.autograd.grad(rms_norm(x, w), (x, w), grad_out)
""",
    "norms": """
import torch
def my_norm(x, weight, eps): return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
def my_layer_norm(x, weight, bias, eps): return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
""",
    "compiled_step": _IMPORTS + """
torch._dynamo.reset()
model = torch.compile(torch.nn.Linear(4, 4), backend="aot_eager")
batches = [torch.randn(2, 4)] * 2
def train_step(batch): model(batch).sum().backward()
""",
    "training": _IMPORTS + """
model = torch.nn.Linear(4, 4)
data = [torch.randn(2, 4)] * 2
loss = lambda y: y.square().sum()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step(): loss(model(data[0])).backward()
""",
    "backward": _IMPORTS + """
model = torch.nn.Linear(4, 4)
loss = model(torch.randn(2, 4)).sum()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
""",
    "sharded": _SHARDED,
    "sharded_step": _SHARDED + _TRAIN_STEP,
    "error": _IMPORTS + "err_over_tol = lambda seed: 0.5\n",
    "dumps": """
from pathlib import Path
for name, scale in (("step1", 2), ("step2", 3)):
    Path(f"{name}.hlo").write_text(
        "HloModule m\\n\\nENTRY main {\\n  p = f32[4] parameter(0)\\n"
        f"  c = f32[] constant({scale})\\n  b = f32[4] broadcast(c), dimensions={{}}\\n"
        "  ROOT r = f32[4] multiply(p, b)\\n}\\n"
    )
""",
    "op_db": _IMPORTS + """
class _Sample:
    def __init__(self, input, *args, **kwargs): self.input, self.args, self.kwargs = input, args, kwargs
class _Sine:
    name, dtypes, op = "sine", (torch.float32,), staticmethod(torch.sin)
    def sample_inputs(self, device, dtype, requires_grad=False):
        yield _Sample(torch.randn(3, device=device, dtype=dtype, requires_grad=requires_grad))
my_op_db = [_Sine()]
""",
    "tensors": _IMPORTS + """
x = stream = torch.randn(2, 8, requires_grad=True)
weight = torch.randn(8, requires_grad=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8))
def train(model): model(x).sum().backward()
""",
    "maps": _IMPORTS + """
value = torch.randn(1, 64 * 64 + 32 * 32, 2, 4)
sampling_locations = torch.rand(1, 3, 2, 2, 4, 2)
attention_weights = torch.rand(1, 3, 2, 2, 4)
""",
    "ops": _IMPORTS + """
import dataclasses
from typing import Any
glu = attention = topk = fold = fn = reference = lambda *args, **named: args[0]
split = lambda x, n: x[:, :n]
inputs = dict(x=rg.tensor("M", "N"))
@dataclasses.dataclass
class State:
    h: Any
    c: Any
MyLinear, MyNorm = torch.nn.Linear, torch.nn.BatchNorm1d
""",
    "program": _IMPORTS + "def my_program(): torch.zeros(3)\n",
    "traces": _IMPORTS + """
from retrograd import trace
for name, scale in (("a", 1.0), ("b", 2.0)):
    with trace.record(level="fast", out=f"{name}.trace") as recorder:
        (torch.ones(3, requires_grad=True) * scale).exp().sum().backward()
        recorder.step()
""",
}  # fmt: skip
