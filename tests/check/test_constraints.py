"""Values that keep to something: drawn so, and gradients judged along it; broken ones found, conventions left alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from specimens import with_backward

import retrograd as rg
from retrograd.check import constraints
from retrograd.check.inputs import base_case, materialise
from retrograd.errors import SpecError

t = rg.tensor
N = dict(N=(1, 40))


def _verify(fn, reference, inputs, only=(), **more):
    more = {"sizes": N, **more} if any("N" in v.names for v in inputs.values()) else more
    return rg.verify(rg.op(fn, reference, inputs, **more), level="quick", only=only)


def _drawn(spec, draw=0, dtype="float32"):
    op = rg.op(torch.sin, torch.sin, dict(x=spec))
    return materialise(op, base_case(op, dtype).but(draw=draw), 0, "cpu")["x"].double()


def _is_triangular(x):
    return torch.equal(x, x.tril()) and bool((x.diagonal(dim1=-2, dim2=-1) > 0).all())


@pytest.mark.parametrize(
    ("values", "keeps"),
    [
        ("symmetric", lambda x: torch.equal(x, x.mT)),
        ("positive_definite", lambda x: torch.equal(x, x.mT) and bool((torch.linalg.eigvalsh(x) > 0.1).all())),
        ("triangular", _is_triangular),
        ("lower_triangular", _is_triangular),
        ("upper_triangular", lambda x: _is_triangular(x.mT)),
        ("orthogonal", lambda x: torch.allclose(x.mT @ x, torch.eye(x.shape[-1]).double(), atol=1e-5)),
        ("sorted", lambda x: torch.equal(x, x.sort(-1).values)),
        ("unique", lambda x: all(len(set(row.tolist())) == x.shape[-1] for row in x.flatten(0, -2))),
        ("permutation", lambda x: torch.equal(x.sort(-1).values, torch.arange(x.shape[-1]).double().expand(x.shape))),
        ("simplex", lambda x: bool((x > 0).all()) and torch.allclose(x.sum(-1), torch.ones(()).double(), atol=1e-5)),
        ("unit_norm", lambda x: torch.allclose(x.norm(dim=-1), torch.ones(()).double(), atol=1e-5)),
    ],
)
def test_values_keep_to_what_they_say(values, keeps):
    x = _drawn(t("B", "N", "N", values=values))
    assert keeps(x)
    assert keeps(_drawn(t("B", 1, 1, values=values)))
    assert _drawn(t(2, 0, 0, values=values)).shape == (2, 0, 0)
    assert values in ("permutation",) or not torch.equal(x, _drawn(t("B", "N", "N", values=values), draw=1))


def test_what_is_unique_is_so_in_sixteen_bits_too():
    assert len(set(_drawn(t(200, values="unique"), dtype="bfloat16").tolist())) == 200


@pytest.mark.parametrize(
    ("values", "keeps"),
    [
        ("sorted", lambda x: torch.equal(x, x.sort(-1).values)),
        ("unique", lambda x: all(len(set(row.tolist())) == 9 for row in x)),
        ("permutation", lambda x: torch.equal(x.sort(-1).values, torch.arange(9).double().expand(4, 9))),
    ],
)
def test_whole_numbers_too(values, keeps):
    assert keeps(_drawn(t(4, 9, dtype="int64", high=12, values=values)))
    spec = rg.op(
        lambda x, i: x[i], lambda x, i: x[i], dict(x=t("V", "N"), i=t("K", dtype="int64", high="V", values="unique"))
    )
    assert spec.where == ("K <= V - 0",)
    assert rg.verify(spec, level="quick", only=["oracle", "shapes"])


def _cholesky_backward(lower_only):
    def backward(dy, a):
        a = a.detach().requires_grad_()
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(torch.linalg.cholesky(a), a, dy)
        return 2 * grad.tril() - torch.diag_embed(grad.diagonal(dim1=-2, dim2=-1)) if lower_only else grad

    return backward


@pytest.mark.parametrize("lower_only", [False, True])
def test_which_half_of_a_symmetric_gradient_has_the_values_is_a_convention(lower_only):
    # All of it in the lower half is as right as half of it in each: they are the same along symmetric matrices.
    function = with_backward(torch.linalg.cholesky, _cholesky_backward(lower_only), once=True)
    assert _verify(function, torch.linalg.cholesky, dict(a=t("N", "N", values="positive_definite")))
    free = lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(a.shape[-1], dtype=a.dtype))  # noqa: E731
    assert _verify(free, free, dict(a=t("N", "N")))


def test_a_symmetric_gradient_of_half_the_size_is_found():
    halved = with_backward(torch.linalg.cholesky, lambda dy, a: _cholesky_backward(True)(dy, a).tril(-1), once=True)
    assert not _verify(halved, torch.linalg.cholesky, dict(a=t("N", "N", values="positive_definite")))


def test_entropy_on_the_simplex():
    entropy = lambda p: -(p * p.log()).sum(-1)  # noqa: E731
    inputs = dict(p=t("M", "N", values="simplex"))
    shifted = with_backward(entropy, lambda dy, p: -dy[..., None] * p.log(), once=True)  # 1 less: no rows sum to more
    assert _verify(shifted, entropy, inputs)
    wrong = with_backward(entropy, lambda dy, p: -dy[..., None] * p.log() * p, once=True)
    assert not _verify(wrong, entropy, inputs)


def test_along_the_sphere_and_along_rotations():
    radial = with_backward(lambda x: 2 * x, lambda dy, x: 2 * dy + x * dy.sum(-1, keepdim=True), once=True)
    assert _verify(radial, lambda x: 2 * x, dict(x=t("M", "N", values="unit_norm")))
    assert not _verify(radial, lambda x: 2 * x, dict(x=t("M", "N")))
    across = with_backward(lambda q: 2 * q, lambda dy, q: 2 * dy + q * dy.mean(), once=True)  # q times the identity
    assert _verify(across, lambda q: 2 * q, dict(q=t("N", "N", values="orthogonal")))
    along = with_backward(lambda q: 2 * q, lambda dy, q: 2 * dy + q.roll(1, -1) * dy.mean(), once=True)
    assert not _verify(along, lambda q: 2 * q, dict(q=t("N", "N", values="orthogonal")), sizes=dict(N=(2, 40)))


class _Unwatched(torch.autograd.Function):
    """x^2 whose gradient takes x from where the version counter does not see it."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        return 2 * ctx.x * dy


@pytest.mark.parametrize(("fn", "right"), [(lambda x: 2 * x, True), (_Unwatched.apply, False)])
def test_a_rotation_that_is_changed_after_the_forward_changes_no_gradient_of_a_linear_op(fn, right):
    # What counts of a gradient is what lies along the rotation that there was.
    report = _verify(fn, None, dict(q=t("N", "N", values="orthogonal")), only=["mutation"])
    assert bool(report) == right, [f.what for f in report.findings]


def test_a_projected_gradient_stays_as_it_is():
    kinds = (*constraints.MATRICES, "simplex", "unit_norm", "sorted")
    spec = rg.op(torch.sin, torch.sin, {k: t("N", "N", values=k) for k in kinds})
    for name, x in materialise(spec, base_case(spec, "float64"), 0, "cpu").items():
        once = constraints.project(spec, name, torch.randn_like(x), x)
        assert torch.allclose(constraints.project(spec, name, once, x), once, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "fn", "grad"),
    [
        ("symmetric", lambda a: a @ a, lambda dy, a: dy @ a.mT + a.mT @ dy),
        ("positive_definite", torch.logdet, lambda dy, a: dy * torch.linalg.inv(a)),
        ("lower_triangular", torch.linalg.inv, lambda dy, a: -(torch.linalg.inv(a).mT @ dy @ torch.linalg.inv(a).mT)),
        ("simplex", lambda p: -(p * p.log()).sum(-1), lambda dy, p: -dy[..., None] * p.log()),
    ],
)
def test_slopes_along_a_plane_show_a_wrong_gradient_without_a_reference(kind, fn, grad):
    inputs = dict(a=t("N", "N", values=kind))
    right = _verify(with_backward(fn, grad, once=True), None, inputs, only=["adjoint"], sizes=dict(N=(2, 40)))
    assert right
    assert right.stage("adjoint").cases
    wrong = with_backward(fn, lambda dy, a: 1.01 * grad(dy, a), once=True)
    assert not _verify(wrong, None, inputs, only=["adjoint"], sizes=dict(N=(2, 40)))
    for kind in ("unit_norm", "orthogonal"):
        report = _verify(torch.sin, None, dict(a=t("N", "N", values=kind)), only=["adjoint"])
        assert "keep to a constraint" in report.stage("adjoint").reason


@pytest.mark.parametrize(("values", "told"), [(None, False), ("unit_norm", True)])
def test_one_tensor_in_two_places_keeps_to_what_both_say(values, told):
    def dots(q, k):
        return (q * k.roll(1, -1)).sum(-1)

    def of_two_tensors(dy, q, k):
        return dy[:, None] * k.roll(1, -1), dy[:, None] * q.roll(-1, -1) * (q.data_ptr() != k.data_ptr())

    inputs = dict(q=t("M", "N", values=values), k=t("M", "N", values="unit_norm"))
    assert _verify(dots, dots, inputs, only=["calls"])
    report = _verify(with_backward(dots, of_two_tensors), dots, inputs, only=["calls"])
    assert [f.kind for f in report.findings] == ["one-tensor"] * told


def test_stages_that_leave_the_values_say_so_in_a_line():
    weighted = lambda p, y: p.log().sum(-1) * y  # noqa: E731
    report = _verify(weighted, weighted, dict(p=t("M", "N", values="simplex"), y=t("M")))
    assert report
    assert report.stage("adjoint").status == "passed"
    for stage in ("kinks", "higher_order"):
        assert report.stage(stage).status == "skipped"
        assert report.stage(stage).reason.startswith("the values of `p` (simplex) keep to a constraint: ")
    layouts = {item for case in _layouts() for item in case.layouts}
    assert ("y", "expanded") in layouts
    assert ("p", "expanded") not in layouts
    assert ("p", "transposed") in layouts


def _layouts():
    from retrograd.check.stages import StageContext, layouts

    inputs = dict(p=t("M", "N", values="simplex"), y=t("M"))
    return layouts.cases(
        StageContext.of(rg.op(lambda p, y: p.sum(-1) * y, lambda p, y: p.sum(-1) * y, inputs), "float32")
    )


def test_values_by_a_callable():
    positive = lambda generator, shape, dtype: (torch.rand(shape, generator=generator) + 0.5).to(dtype)  # noqa: E731
    inputs = dict(x=t("M", "N", values=positive))
    assert _verify(torch.log, torch.log, inputs, dtypes=["float32", "bfloat16"])
    assert not _verify(with_backward(torch.log, lambda dy, x: dy / (x + 0.1), once=True), torch.log, inputs)
    short = dict(x=t("M", "N", values=lambda generator, shape, dtype: torch.zeros(3)))
    with pytest.raises(
        SpecError, match=r"`values` of 'x' returned \(3,\) of torch.float32, expected a tensor of shape"
    ):
        _verify(torch.log, torch.log, short)


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        (("N",), dict(values="symmetric"), "expected at least 2"),
        (("M", "N"), dict(values="symmetric"), "expected the last two to be the same"),
        (("N",), dict(values="soted"), "expected one of symmetric"),
        (("N",), dict(values="simplex", dtype="int64", high=3), "expected sorted, unique or permutation"),
        (("N",), dict(values="simplex", low=0.0, high=1.0), "`low` and `high`"),
        (("N",), dict(values="simplex", scale=3.0), "`scale`"),
        (("N",), dict(values="simplex", dtype="complex"), "of real numbers"),
        ((torch.ones(3),), dict(low=0.0, high=1.0), r"\['low', 'high'\] of a concrete tensor"),
        ((torch.arange(3),), dict(grad=True), "`grad` is True of a concrete tensor of torch.int64"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, more, message):
    with pytest.raises(SpecError, match=message):
        t(*arguments, **more)


def test_a_concrete_tensor_has_the_dtype_under_test_and_no_gradient_if_it_says_so():
    scale = torch.linspace(1, 2, 5)
    inputs = dict(x=t("M", 5), s=t(scale, grad=False), w=t(scale.flip(0)), m=t(scale, dtype="float64", grad=False))

    def fn(x, s, w, m):
        assert m.dtype == torch.float64
        return x * s * w

    report = _verify(fn, fn, inputs, dtypes=["float32", "bfloat16"])
    assert report
    wrong = with_backward(
        lambda x, s, w, m: x * s * w, lambda dy, x, s, w, m: (dy * s * w, None, dy.sum(0), None), once=True
    )
    assert {f.tensor for f in _verify(wrong, fn, inputs).findings} == {"grad w"}
    # A gradient that is not asked for is not missed.
    stopped = lambda x, s, w, m: x * s.detach() * w  # noqa: E731
    assert _verify(stopped, fn, inputs)
    assert not _verify(stopped, fn, inputs | dict(s=t(scale)))


def _means(x, offsets):
    ends = offsets.tolist()
    return torch.stack([x[a:b].mean(0) for a, b in pairwise(ends)])


def _means_by_stride(x, offsets):
    ends = torch.as_strided(offsets, offsets.shape, (1,)).tolist()  # as a kernel reads them
    return torch.stack([x[a:b].mean(0) for a, b in pairwise(ends)])


def _means_of_known(x, offsets):  # the reference of somebody who knows where the rows end
    return torch.stack([x[0:1].mean(0), x[1:5].mean(0)])


def test_whole_numbers_of_the_user_keep_their_values_at_every_layout():
    """Offsets that all are the first one are no offsets: a right op had a finding "only with offsets:expanded"."""
    inputs = dict(x=t(5, "N"), offsets=t(torch.tensor([0, 1, 5])))
    assert _verify(_means, _means_of_known, inputs, only=("layouts",)).verdict == "proved"
    report = _verify(_means_by_stride, _means_of_known, inputs, only=("layouts",))
    assert {f.case.layouts for f in report.findings} == {(("offsets", "sliced"),)}
