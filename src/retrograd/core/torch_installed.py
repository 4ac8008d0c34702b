"""Requirement of packages that are torch through and through: importing this without torch names the extra."""

from retrograd.core.loading import require_torch

require_torch("this part of retrograd")
