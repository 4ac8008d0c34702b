"""Pairs of graphs of routed experts, a U-Net, gated cells, attention in groups, soft actors, quantiles and optimisers.

    python benchmarks/graph_trust_torch_twelfth.py FOLDER    # needs torch

For `graph_trust.py`. Each pair as Dynamo's graph, joint graph, forward and backward, or as exported, as far as these
differ. Programs, changes and what is expected were written, and frozen in a commit, before any result.
"""

from __future__ import annotations

import torch
from graph_trust_pairs import Options, Pair, Texts, main
from graph_trust_torch import graphs
from torch import nn
from torch.nn import functional as F


def chosen(o: Options) -> Texts:
    """Experts chosen by the best of noisy scores, a loss that keeps them even."""
    count, size = o.get("experts", 3), o.get("size", 10)
    gate = nn.Linear(6, count, bias=o.get("bias", False))
    up, down = (nn.Parameter(torch.randn(count, *s)) for s in ((6, size), (size, 6)))

    def f(x: torch.Tensor) -> torch.Tensor:
        scores = gate(x)
        if o.get("noise"):
            scores = scores + torch.rand_like(scores) * o["noise"]
        best, where = scores.topk(o.get("best", 2), -1)
        share = best.softmax(-1) if o.get("late", True) else scores.softmax(-1).gather(-1, where)
        hidden = o.get("act", F.silu)(torch.einsum("td,edh->teh", x, up))
        out = torch.einsum("teh,ehd->ted", hidden, down)
        picked = out.gather(1, where[..., None].expand(-1, -1, 6))
        mixed = (picked * share[..., None]).sum(1)
        used = F.one_hot(where, count).float().mean((0, 1))
        even = count * (used * scores.softmax(-1).mean(0)).sum()
        return (
            (mixed - x).square().mean() + o.get("even", 0.02) * even + o.get("z", 0.003) * scores.logsumexp(-1).mean()
        )

    return graphs(f, torch.randn(8, 6))


def segmented_by(o: Options) -> Texts:
    """A U-Net of one level with a loss of overlaps."""
    start = nn.Conv2d(3, 6, 3, padding=1, padding_mode=o.get("mode", "zeros"))
    norm = nn.GroupNorm(o.get("groups", 2), 6, eps=o.get("eps", 1e-5))
    down = nn.Conv2d(6, 8, o.get("kernel", 3), stride=2, padding=o.get("dilation", 1), dilation=o.get("dilation", 1))
    up = nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1, output_padding=0)
    end = nn.Conv2d(12, 2, 1, bias=o.get("bias", True))

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = o.get("act", F.relu)(norm(start(x)))
        h = F.dropout2d(F.relu(down(first)), o.get("drop", 0.2))
        h = up(h) if o.get("learnt", True) else F.interpolate(h[:, :6], size=(8, 8), mode=o.get("by", "nearest"))
        odds = end(torch.cat([h, first], 1)).softmax(1)
        met = (odds * y).sum((2, 3))
        dice = (2 * met + o.get("smooth", 1.0)) / ((odds + y).sum((2, 3)) + o.get("smooth", 1.0))
        return 1 - dice.mean() + o.get("weight", 0.4) * F.binary_cross_entropy(odds, y)

    return graphs(f, torch.randn(2, 3, 8, 8), torch.rand(2, 2, 8, 8))


def gated_cells(o: Options) -> Texts:
    """A cell by hand over steps, written into a tensor in place, and a head that weighs the steps."""
    cell = nn.GRUCell(4, 6, bias=o.get("bias", True))
    head = nn.Linear(6, 3)

    def f(x: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        h = torch.full((2, 6), o.get("first", 0.0))
        kept = torch.zeros(o.get("steps", 3), 2, 6)
        for k in range(o.get("steps", 3)):
            t = o.get("steps", 3) - 1 - k if o.get("backwards") else k
            new = cell(x[t], h)
            h = torch.where(alive[t, :, None], new, h) if o.get("masked", True) else new
            kept[t] = h
        if o.get("cleared"):
            kept[0].zero_()
        weight = (kept.mean(-1) / o.get("heat", 0.7)).softmax(o.get("axis", 0))
        told = head((kept * weight[..., None]).sum(0))
        return F.smooth_l1_loss(told.tanh(), torch.ones(2, 3), beta=o.get("beta", 0.5))

    return graphs(f, torch.randn(4, 2, 4), torch.ones(4, 2, dtype=torch.bool))


class Grouped(nn.Module):
    """Attention of few keys for many queries, a cache beside."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        self.few = o.get("few", 2)
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 2 * self.few * 4, bias=o.get("bias", True))
        self.norm = nn.RMSNorm(16, eps=o.get("eps", 1e-6))
        self.out = nn.Linear(16, 16)
        self.register_buffer("slopes", torch.tensor([1.0, 0.5, 0.25, 0.125]) * o.get("slope", 1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        o, (b, t, _) = self.o, x.shape
        h = self.norm(x) if o.get("before", True) else x
        q = self.q(h).view(b, t, 4, 4).transpose(1, 2)
        k, v = self.kv(h).view(b, t, 2, self.few, 4).permute(2, 0, 3, 1, 4)
        bias = None
        if o.get("alibi"):
            bias = self.slopes[:, None, None] * (torch.arange(t)[None] - torch.arange(t)[:, None])
        a = F.scaled_dot_product_attention(
            q, k, v, bias, is_causal=o.get("causal", True) and bias is None, scale=o.get("scale"), enable_gqa=True
        )
        y = self.out(a.transpose(1, 2).reshape(b, t, 16))
        y = y if o.get("before", True) else self.norm(y)
        return x * o.get("keep", 1.0) + y


def grouped_heads(o: Options) -> Texts:
    return graphs(Grouped(o).to(o.get("dtype", torch.float32)), torch.randn(2, 5, 16, dtype=o.get("dtype")))


def grouped_exported(o: Options) -> Texts:
    """What torch.export prints, before and after decomposing."""
    torch.manual_seed(0)
    program = torch.export.export(Grouped(o), (torch.randn(2, 5, 16),), strict=False)
    return {"exported": str(program), "decomposed": str(program.run_decompositions())}


def soft_actor(o: Options) -> Texts:
    """Two critics, the lesser as target, an actor whose draws are squeezed, a temperature that is learnt."""
    actor, one, two = nn.Linear(4, 4), nn.Linear(6, 1), nn.Linear(6, 1)
    heat = nn.Parameter(torch.zeros(()))

    def f(seen: torch.Tensor, act: torch.Tensor, gain: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        def drawn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mean, spread = actor(x).chunk(2, -1)
            spread = spread.clamp(o.get("low", -5.0), 2.0)
            raw = mean + spread.exp() * torch.randn_like(mean)
            logp = (-0.5 * ((raw - mean) / spread.exp()) ** 2 - spread).sum(-1)
            return raw.tanh(), logp - torch.log(1 - raw.tanh() ** 2 + o.get("tiny", 1e-6)).sum(-1)

        with torch.no_grad():
            following, logp = drawn(after)
            both = torch.cat([after, following], -1)
            least = o.get("least", torch.minimum)(one(both), two(both))[:, 0]
            target = gain + o.get("gamma", 0.98) * (least - heat.exp() * logp)
        told = torch.cat([seen, act], -1)
        error = o.get("error", F.mse_loss)
        wrong = error(one(told)[:, 0], target) + error(two(told)[:, 0], target)
        own, logp = drawn(seen)
        worth = torch.minimum(one(torch.cat([seen, own], -1)), two(torch.cat([seen, own], -1)))[:, 0]
        scale = heat.exp().detach() if o.get("stopped", True) else heat.exp()
        policy = (scale * logp - worth).mean()
        return wrong + policy - (heat * (logp.detach() + o.get("want", -2.0))).mean() * o.get("share", 1.0)

    return graphs(f, torch.randn(3, 4), torch.randn(3, 2), torch.randn(3), torch.randn(3, 4))


def quantiles(o: Options) -> Texts:
    """Quantiles of one's own function, an embedding in bags, a norm over batches, a scan of sums."""
    bag = nn.EmbeddingBag(12, 6, mode=o.get("mode", "mean"))
    norm = nn.BatchNorm1d(6, momentum=o.get("momentum", 0.1), affine=o.get("affine", True))
    head = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)) if o.get("normed") else nn.Linear(6, 3)

    class Pinball(torch.autograd.Function):
        @staticmethod
        def forward(ctx, wrong, at):
            ctx.save_for_backward(wrong, at)
            return torch.maximum(at * wrong, (at - 1) * wrong)

        @staticmethod
        def backward(ctx, grad):
            wrong, at = ctx.saved_tensors
            return grad * torch.where(wrong > 0, at, at - 1) * o.get("bent", 1.0), None

    def f(ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = norm(bag(ids))
        h = F.leaky_relu(h, o.get("slope", 0.1))
        h = F.alpha_dropout(h, o["alpha"]) if "alpha" in o else h
        ordered = head(h).cumsum(-1) if o.get("summed", True) else head(h).sort(-1).values
        at = torch.tensor([0.1, 0.5, o.get("top", 0.9)])
        return Pinball.apply(y[:, None] - ordered, at).sum(-1).mean()

    return graphs(f, torch.randint(0, 12, (4, 3)), torch.randn(4))


def stepped_by(o: Options) -> Texts:
    o = dict(o)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    tuned = o.pop("kind", torch.optim.NAdam)(model.parameters(), **{"lr": 0.01} | o)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return graphs(lambda: tuned.step())


muon = {"kind": torch.optim.Muon}
PAIRS: list[Pair] = [
    ("chosen best", chosen, {}, {"best": 1}, r"topk|2.* -> .*1"),
    ("chosen late", chosen, {}, {"late": False}, r"softmax|gather|reads|operand"),
    ("chosen noise", chosen, {"noise": 0.1}, {"noise": 0.3}, r"0\.1.*0\.3"),
    ("chosen act", chosen, {}, {"act": F.gelu}, r"silu|gelu|sigmoid|erf"),
    ("chosen even", chosen, {}, {"even": 0.05}, r"0\.02.*0\.05|0\.06.*0\.15"),
    ("chosen z", chosen, {}, {"z": 0.01}, r"0\.003.*0\.01|0\.00037.*0\.00125"),
    ("chosen experts", chosen, {}, {"experts": 4}, r"\[3,.* -> .*\[4,"),
    ("segmented mode", segmented_by, {}, {"mode": "reflect"}, r"pad"),
    ("segmented groups", segmented_by, {}, {"groups": 3}, r"group_norm|2.* -> .*3"),
    ("segmented dilation", segmented_by, {"dilation": 1}, {"dilation": 2}, r"conv.*(?:dilation|\[?1.*2|\(2, 2\))"),
    ("segmented drop", segmented_by, {}, {"drop": 0.35}, r"0\.2.*0\.35|0\.8.*0\.65"),
    ("segmented fixed", segmented_by, {}, {"learnt": False}, r"parameter|conv|interpolate|upsample|slice"),
    ("segmented smooth", segmented_by, {}, {"smooth": 0.5}, r"1\.0.*0\.5|1 -> 0\.5"),
    ("segmented weight", segmented_by, {}, {"weight": 0.7}, r"0\.4.*0\.7"),
    ("cells first", gated_cells, {"first": 0.1}, {"first": 0.2}, r"0\.1.*0\.2"),
    ("cells unmasked", gated_cells, {}, {"masked": False}, r"where|parameter"),
    ("cells backwards", gated_cells, {}, {"backwards": True}, r"0.*2|getitem|select|operand|setitem|reads|index"),
    ("cells cleared", gated_cells, {}, {"cleared": True}, r"zero|fill|full|select"),
    ("cells axis", gated_cells, {}, {"axis": 1}, r"softmax|0.*1"),
    ("cells beta", gated_cells, {}, {"beta": 0.25}, r"0\.5.*0\.25"),
    ("cells steps", gated_cells, {}, {"steps": 4}, r"3.*4|\+ "),
    ("grouped scale", grouped_heads, {}, {"scale": 0.3}, r"scale|0\.5.*0\.3|0\.707.*0\.547"),
    ("grouped acausal", grouped_heads, {}, {"causal": False}, r"causal|True.*False|mask|where|tril"),
    ("grouped behind", grouped_heads, {}, {"before": False}, r"reads|operand|norm|- |\+ |exchanged|linear"),
    ("grouped alibi", grouped_heads, {}, {"alibi": True}, r"\+ |parameter|attn"),
    ("grouped eps", grouped_heads, {}, {"eps": 1e-4}, r"1e-0?6.*0\.0001"),
    ("grouped dtype", grouped_heads, {}, {"dtype": torch.bfloat16}, r"f32.*bf16"),
    ("exported few", grouped_exported, {}, {"few": 4}, r"\[16,16\].* -> .*\[32,16\]"),
    ("exported keep", grouped_exported, {"keep": 0.9}, {"keep": 0.7}, r"0\.9.*0\.7"),
    ("exported scale", grouped_exported, {}, {"scale": 0.3}, r"scale|0\.5.*0\.3|0\.707.*0\.547"),
    ("soft gamma", soft_actor, {}, {"gamma": 0.9}, r"0\.98.*0\.9"),
    ("soft most", soft_actor, {}, {"least": torch.maximum}, r"minimum|maximum"),
    ("soft error", soft_actor, {}, {"error": F.l1_loss}, r"mse|l1|abs|pow|sign"),
    ("soft low", soft_actor, {}, {"low": -4.0}, r"-5.*-4"),
    ("soft unstopped", soft_actor, {}, {"stopped": False}, r"detach|reads|operand|\+ |output|exp"),
    ("soft want", soft_actor, {}, {"want": -3.0}, r"-2.*-3"),
    ("quantiles mode", quantiles, {}, {"mode": "sum"}, r"mode|1.*0|embedding_bag"),
    ("quantiles momentum", quantiles, {}, {"momentum": 0.05}, r"0\.1.*0\.05|0\.9.*0\.95"),
    ("quantiles slope", quantiles, {}, {"slope": 0.2}, r"0\.1.*0\.2"),
    ("quantiles sorted", quantiles, {}, {"summed": False}, r"cumsum|sort|flip"),
    ("quantiles bent", quantiles, {"bent": 0.9}, {"bent": 0.7}, r"0\.9.*0\.7"),
    ("quantiles bare", quantiles, {}, {"affine": False}, r"parameter|batch_norm|mul"),
    ("nadam decay", stepped_by, {}, {"momentum_decay": 0.01}, r"0\.004.*0\.01"),
    ("nadam for radam", stepped_by, {}, {"kind": torch.optim.RAdam}, r"\+ |- |replaced"),
    ("muon momentum", stepped_by, muon, muon | {"momentum": 0.9}, r"0\.95.*0\.9|0\.05.*0\.1"),
    ("muon steps", stepped_by, muon, muon | {"ns_steps": 4}, r"- |\+ "),
    ("muon plain", stepped_by, muon, muon | {"nesterov": False}, r"- .*(?:lerp|add|mul)|lerp"),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"twelfth": PAIRS})
