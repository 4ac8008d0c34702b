"""Operators by name: which are exact, smooth, decide or add up, and what a dispatch mode looks up of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from retrograd.compat.torch_dispatch import decompositions, schema
from retrograd.compat.torch_tensors import is_zeros_without_memory


def _names(operators: str) -> frozenset[str]:
    return frozenset(operators.split())


# Fused operators hide their inner cancellation from a mode that only sees their result: taken apart.
FUSED = _names("""
native_layer_norm native_layer_norm_backward _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
gelu gelu_backward silu silu_backward native_group_norm native_group_norm_backward native_batch_norm
native_batch_norm_backward _fused_rms_norm _fused_rms_norm_backward var var_mean std std_mean logsumexp mse_loss
mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward softplus softplus_backward
elu elu_backward mish mish_backward sigmoid_backward tanh_backward hardswish hardswish_backward binary_cross_entropy
binary_cross_entropy_backward addcmul addcdiv
""")

# Results that are exact whatever the precision: selections, copies, sign changes.
EXACT = _names("""
abs neg relu clamp clamp_min clamp_max where maximum minimum amax amin max min argmax argmin clone copy copy_
_to_copy zeros zeros_like ones ones_like full full_like empty empty_like new_zeros new_ones new_full new_empty fill
fill_ zero_ index gather cat stack flip roll constant_pad_nd threshold_backward sort topk embedding index_select
masked_fill new_empty_strided empty_strided scalar_tensor arange detach lift_fresh sign max_pool2d_with_indices
max_pool2d_with_indices_backward tril triu select_backward slice_backward eq ne lt gt le ge floor ceil round trunc
repeat floor_divide index_put squeeze unsqueeze view expand permute
""")


# Results of operators that are exact beside others that are not: which classes are targets, as 0 and 1.
EXACT_RESULTS = {"multilabel_margin_loss_forward": (1,)}

# Smooth wherever they are defined: a reference made of these alone has no kink to look for. Of where, what has made the
# condition decides.
SMOOTH = _names("""
add sub rsub mul div neg pow square sqrt rsqrt reciprocal exp expm1 log log1p erf erfc tanh tanh_backward sin cos
tan sinh cosh asin acos atan asinh acosh atanh exp2 log2 log10 logaddexp logaddexp2 logcumsumexp lgamma erfinv logit
sigmoid sigmoid_backward sum mean cumsum mm bmm addmm baddbmm dot mv convolution convolution_backward var var_mean
std std_mean addcmul addcdiv real
_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax logsumexp gelu gelu_backward
silu silu_backward mish mish_backward softplus softplus_backward native_layer_norm native_layer_norm_backward
native_group_norm native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward mse_loss mse_loss_backward
nll_loss_forward nll_loss_backward log_sigmoid_forward log_sigmoid_backward lerp prod cumprod where
view _unsafe_view reshape expand permute transpose t squeeze unsqueeze slice select as_strided detach clone copy_
_to_copy to alias split split_with_sizes unbind cat stack flip roll repeat constant_pad_nd select_backward
slice_backward select_scatter slice_scatter diagonal_backward diagonal_scatter unfold_backward im2col col2im scatter
avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward replication_pad1d
replication_pad1d_backward replication_pad2d replication_pad2d_backward _fft_r2c _fft_c2c _fft_c2r
tril triu diagonal index index_put index_select index_add gather scatter_add embedding
embedding_dense_backward masked_fill lift_fresh zeros zeros_like ones ones_like full full_like empty empty_like
new_zeros new_ones new_full new_empty new_empty_strided empty_strided fill zero_ fill_ scalar_tensor arange
_efficientzerotensor
""")

# What an operator decides: which of its results are decisions, or which number they are taken by. A decision that falls
# otherwise for other roundings is a switch near which the function may have a kink or a jump.
DECIDING = {"eq", "ne", "lt", "gt", "le", "ge", "floor", "ceil", "round", "trunc", "sign", "isnan", "floor_divide"}
JUMPING = {"floor", "ceil", "round", "trunc", "sign", "floor_divide"}
AGAINST_ZERO = _names("relu abs leaky_relu threshold threshold_backward relu_ prelu elu celu selu")
EXTREMA = {"amax", "amin"}  # without the place, which their gradients look for
KEEPING = {"clamp", "clamp_min", "clamp_max", "hardtanh", "maximum", "minimum"}

# What these make of a NaN is their meaning, where another operator that is not smooth decides by it as it happens to.
OF_NAN = _names("abs amax amin where isnan isinf isfinite eq ne nan_to_num nansum")

# Of whole numbers (rows and columns to read from, counts) these are exact, as long as a float can hold each of them.
WHOLE = {"add", "sub", "rsub", "mul", "square", "pow", "remainder", "fmod"}
# And these in any order, where a float can hold as many of the largest as there are.
WHOLE_SUMS = {"index_add", "scatter_add", "sum", "cumsum"}

# These make floats of torch's default dtype where they are not told another. Random ones would draw other numbers.
MAKING = {"arange", "empty", "eye", "full", "linspace", "logspace", "ones", "scalar_tensor", "zeros"}

# Told by an argument that they take the least or the largest of the numbers, these make no other.
CHOOSING = {"segment_reduce", "scatter_reduce", "index_reduce"}
# And these where their order, at this place among the arguments, is infinite or zero.
NORMS = {"linalg_vector_norm": 1, "_cdist_forward": 2}

# Products of matrices, and where their factors stand among the arguments.
FACTORS = {"mm": ("mm", 0), "bmm": ("bmm", 0), "addmm": ("mm", 1), "baddbmm": ("bmm", 1)}
PRODUCTS = {*FACTORS, "convolution"}

# What adds up, so that a partial sum may be larger than the result.
ADDING = {"sum", "mean", "mm", "bmm", "addmm", "baddbmm", "cumsum", "convolution", "index_add", "scatter_add"}


DECOMPOSE = decompositions(FUSED)


@dataclass(frozen=True, slots=True, eq=False)
class OperatorTraits:
    """What the mode has to know of an operator, looked up once: hashing one takes as long as a small sum.

    Attributes:
        overload: the operator, kept so that its identity stays its own.
        name: without namespace.
        returns_alias: whether it returns memory that it was given.
        exact: whether its results are, unless they add up.
        decomposition: what it is taken apart into; None where it is not.
        zeros: whether it makes zeros without memory.
        in_place: whether it changes its first operand, by its name.
        view: whether all that it does is to look at memory that it was given in another way.
    """

    overload: Any
    name: str
    returns_alias: bool
    exact: bool
    decomposition: Any
    zeros: bool
    in_place: bool
    view: bool


_KNOWN: dict[int, OperatorTraits] = {}


def about(func: Any) -> OperatorTraits:
    operator = _KNOWN.get(id(func))
    if operator is None:
        name, returns = schema(func).name.removeprefix("aten::"), schema(func).returns
        returns_alias, in_place = any(r.alias_info for r in returns), name.endswith("_")
        exact = name in EXACT or name.removesuffix("_") in EXACT
        zeros, taken_apart = is_zeros_without_memory(func), DECOMPOSE.get(func)
        view = bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)
        view = view and not in_place and taken_apart is None and name not in ADDING
        operator = OperatorTraits(
            func, name, returns_alias, exact, taken_apart, zeros, in_place, view
        )  # fmt: skip
        _KNOWN[id(func)] = operator
    return operator
