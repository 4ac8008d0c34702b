"""RMSNorm and LayerNorm as subclasses of torch's: parameters, names and repr are torch's, the computation is ours."""

# torch types parameters of modules as Tensor or Module, and a mixin's base as object.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch

from retrograd.ops import layer_norm, rms_norm
from retrograd.ops.norm.validation import check_shape_and_device


class NormOptions(TypedDict, total=False):
    """Keywords of the modules beyond those of torch; meaning and defaults are those of `retrograd.ops.rms_norm`."""

    weight_offset: float
    deterministic: bool
    dw_parts: int | None
    accumulate_main_grad: bool
    residual_dtype: torch.dtype | None
    out_dtype: torch.dtype | None
    impl: str | None


def check_options(options: NormOptions) -> None:
    """Raise TypeError for a keyword that the modules do not have."""
    for name in options:
        if name not in _DEFAULTS:
            raise TypeError(f"`{name}` is not an option of the norms, expected some of {', '.join(_DEFAULTS)}")


class _Options(torch.nn.Module):
    """What both norms add to torch's."""

    # Options live in class attributes, so that an instance of the torch class becomes ours by changing its class.
    weight_offset: float = 0.0
    deterministic: bool = True
    dw_parts: int | None = None
    accumulate_main_grad: bool = False
    residual_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    impl: str | None = None

    def _set_options(self, options: NormOptions) -> None:
        check_options(options)
        for name, value in options.items():
            setattr(self, name, value)
        if self.weight_offset:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as torch does, with an effective weight of one."""
        super().reset_parameters()
        if self.weight_offset and self.weight is not None:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def extra_repr(self) -> str:
        """Torch's own and the options that are not the usual ones."""
        changed = [f"{name}={value}" for name in _DEFAULTS if (value := getattr(self, name)) != _DEFAULTS[name]]
        return ", ".join([super().extra_repr(), *changed])

    def _call(
        self, norm: Any, tensors: tuple[torch.Tensor | None, ...], eps: float, prenorm: bool
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`norm` of (x, weight, bias, residual) with the options; several normalised dimensions are made one."""
        x, residual = tensors[0], tensors[3]
        shape = self.normalized_shape
        if x.shape[-len(shape) :] != shape:
            raise ValueError(
                f"`x` has shape {tuple(x.shape)}, expected its last dimensions to be {shape}, the normalized_shape"
            )
        if residual is not None:
            check_shape_and_device("residual", residual, x)
        flat = tensors
        if len(shape) > 1:
            flat = [None if t is None else t.flatten(-len(shape)) for t in tensors]
        options = {name: getattr(self, name) for name in _DEFAULTS}
        out = norm(*flat, eps=eps, prenorm=prenorm, **options)
        if len(shape) == 1:
            return out
        return tuple(t.reshape(x.shape) for t in out) if prenorm else out.reshape(x.shape)


_DEFAULTS: dict[str, Any] = {name: getattr(_Options, name) for name in NormOptions.__annotations__}


class RMSNorm(_Options, torch.nn.RMSNorm):
    """torch.nn.RMSNorm computed by `retrograd.ops.rms_norm`, with an optional residual.

    Args:
        normalized_shape: one size or several; the last dimensions of x.
        eps: None is torch.finfo(torch.float32).eps, for a float64 x torch.finfo(torch.float64).eps, as in torch.
        elementwise_affine: Whether there is a weight.
        device: of the weight.
        dtype: of the weight; free of the dtype of x.
        options: see `NormOptions`. With weight_offset the weight starts at 1 - weight_offset.

    Raises:
        TypeError: an option is unknown.

    Numerics: as `retrograd.ops.rms_norm`. Under autocast y has the dtype of x.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[NormOptions],
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self._set_options(options)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, prenorm: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return y, with prenorm (y, s) where s = x + residual, or x itself without a residual."""
        eps = self.eps
        if eps is None:
            # Not that of x: torch adds it where it computes, which for 16-bit x is in float32.
            eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        return self._call(rms_norm, (x, self.weight, None, residual), eps, prenorm)


class LayerNorm(_Options, torch.nn.LayerNorm):
    """torch.nn.LayerNorm computed by `retrograd.ops.layer_norm`, with an optional residual.

    Args:
        normalized_shape: one size or several; the last dimensions of x.
        eps: added to the variance.
        elementwise_affine: Whether there is a weight.
        bias: Whether there is a bias beside the weight.
        device: of weight and bias.
        dtype: of weight and bias; free of the dtype of x.
        options: see `NormOptions`. With weight_offset the weight starts at 1 - weight_offset.

    Raises:
        TypeError: an option is unknown.

    Numerics: as `retrograd.ops.layer_norm`. Under autocast y has the dtype of x, not float32 as in torch.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[NormOptions],
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self._set_options(options)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, prenorm: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return y, with prenorm (y, s) where s = x + residual, or x itself without a residual."""
        return self._call(layer_norm, (x, self.weight, self.bias, residual), self.eps, prenorm)
