"""Specs of RoMa: rotations, their averages and projections."""

from __future__ import annotations

import roma
import torch
from describe import add, alone

from retrograd import tensor as t

VECTORS = dict(x=t("N", 3))
SIZES = dict(N=(1, 60))


def rodrigues(x: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros_like(x[:, 0])
    rows = [zero, -x[:, 2], x[:, 1], x[:, 2], zero, -x[:, 0], -x[:, 1], x[:, 0], zero]
    return torch.linalg.matrix_exp(torch.stack(rows, -1).view(-1, 3, 3))


add("roma.rotvec_to_rotmat", roma.rotvec_to_rotmat, rodrigues, VECTORS, sizes=SIZES, algorithm_error=4.0)
UNIT = lambda q: q / q.norm(dim=-1, keepdim=True)  # noqa: E731
QUATERNIONS = dict(p=t("N", 4), q=t("N", 4))
for name, fn, inputs in (
    ("rotvec_to_unitquat", roma.rotvec_to_unitquat, VECTORS),
    ("rotmat_to_rotvec", lambda x: roma.rotmat_to_rotvec(roma.rotvec_to_rotmat(x)), dict(x=t("N", 3, low=0.2, high=1.2))),
    ("rotmat_to_unitquat", lambda x: roma.rotmat_to_unitquat(roma.rotvec_to_rotmat(x)), dict(x=t("N", 3, low=0.2, high=1.2))),
    ("unitquat_to_rotvec", lambda q: roma.unitquat_to_rotvec(UNIT(q)), dict(q=t("N", 4))),
    ("quat_product", roma.quat_product, QUATERNIONS),
    ("quat_action", lambda q, v: roma.quat_action(UNIT(q), v), dict(q=t("N", 4), v=t("N", 3))),
    ("unitquat_slerp", lambda p, q: roma.unitquat_slerp(UNIT(p), UNIT(q), torch.linspace(0, 1, 3, dtype=p.dtype)), QUATERNIONS),
    ("unitquat_geodesic_distance", lambda p, q: roma.unitquat_geodesic_distance(UNIT(p), UNIT(q)), QUATERNIONS),
    ("rotmat_geodesic_distance", lambda x, y: roma.rotmat_geodesic_distance(roma.rotvec_to_rotmat(x), roma.rotvec_to_rotmat(y)),
     dict(x=t("N", 3), y=t("N", 3))),
    ("procrustes", lambda m: roma.procrustes(m), dict(m=t("N", 3, 3))),
    ("special_procrustes", lambda m: roma.special_procrustes(m), dict(m=t("N", 3, 3))),
    ("special_gramschmidt", lambda m: roma.special_gramschmidt(m), dict(m=t("N", 3, 2))),
    ("rigid_points_registration", lambda x, y: roma.rigid_points_registration(x, y), dict(x=t("N", 6, 3), y=t("N", 6, 3))),
    ("euler_to_rotmat", lambda x: roma.euler_to_rotmat("xyz", x), VECTORS),
    ("symmatrixvec_to_unitquat", roma.symmatrixvec_to_unitquat, dict(x=t("N", 10))),
):  # fmt: skip
    alone(f"roma.{name}", fn, inputs, sizes=SIZES)
