"""Every private name of PyTorch that buckets rest on, in one place, and a test that they still mean what they meant.

FSDP2 offers no public hook between "the gradients of a group are ready" and "reduce them": a custom reduce-scatter is
called too late, what follows it divides, casts and hands out. So one global name of
`torch.distributed.fsdp._fully_shard._fsdp_param_group` is replaced: `foreach_reduce`, which copies gradients in,
reduces, casts and hands out, for any list of parameters. Calls for models without buckets pass through.

Read in 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0; what differs between them stands in `VERSIONS`.
"""

from __future__ import annotations

from retrograd.compat.fsdp2.foreach_reduce import ReduceCall as ReduceCall
from retrograd.compat.fsdp2.foreach_reduce import device_handle as device_handle
from retrograd.compat.fsdp2.foreach_reduce import give_back as give_back
from retrograd.compat.fsdp2.foreach_reduce import original as original
from retrograd.compat.fsdp2.foreach_reduce import reduce_as_given as reduce_as_given
from retrograd.compat.fsdp2.foreach_reduce import take_over as take_over
from retrograd.compat.fsdp2.foreach_reduce import wire_dtype as wire_dtype
from retrograd.compat.fsdp2.param_groups import begun as begun
from retrograd.compat.fsdp2.param_groups import buffers_in_flight as buffers_in_flight
from retrograd.compat.fsdp2.param_groups import compiled_autograd as compiled_autograd
from retrograd.compat.fsdp2.param_groups import custom_comms as custom_comms
from retrograd.compat.fsdp2.param_groups import drop_gradients as drop_gradients
from retrograd.compat.fsdp2.param_groups import failed as failed
from retrograd.compat.fsdp2.param_groups import forget as forget
from retrograd.compat.fsdp2.param_groups import forward_order as forward_order
from retrograd.compat.fsdp2.param_groups import grad_dtype as grad_dtype
from retrograd.compat.fsdp2.param_groups import groups_of as groups_of
from retrograd.compat.fsdp2.param_groups import in_backward as in_backward
from retrograd.compat.fsdp2.param_groups import inputs_kept as inputs_kept
from retrograd.compat.fsdp2.param_groups import look_again as look_again
from retrograd.compat.fsdp2.param_groups import manual as manual
from retrograd.compat.fsdp2.param_groups import modules_of as modules_of
from retrograd.compat.fsdp2.param_groups import names_of as names_of
from retrograd.compat.fsdp2.param_groups import no_gradient as no_gradient
from retrograd.compat.fsdp2.param_groups import parameter_names as parameter_names
from retrograd.compat.fsdp2.param_groups import ranks_of as ranks_of
from retrograd.compat.fsdp2.param_groups import shadow as shadow
from retrograd.compat.fsdp2.param_groups import shape_of_mesh as shape_of_mesh
from retrograd.compat.fsdp2.param_groups import states_of as states_of
from retrograd.compat.fsdp2.param_groups import trainable as trainable
from retrograd.compat.fsdp2.param_groups import uncompiled as uncompiled
from retrograd.compat.fsdp2.param_groups import unshadow as unshadow
from retrograd.compat.fsdp2.param_groups import wait_for_offload as wait_for_offload
from retrograd.compat.fsdp2.param_groups import wire_numel as wire_numel
from retrograd.compat.fsdp2.self_test import self_test as self_test
from retrograd.compat.fsdp2.versions import BACKWARD_BEGINS as BACKWARD_BEGINS
from retrograd.compat.fsdp2.versions import BACKWARD_ENDS as BACKWARD_ENDS
from retrograd.compat.fsdp2.versions import FORWARD_BEGINS as FORWARD_BEGINS
from retrograd.compat.fsdp2.versions import INPUTS_WATCHED as INPUTS_WATCHED
from retrograd.compat.fsdp2.versions import RESET as RESET
from retrograd.compat.fsdp2.versions import VERSIONS as VERSIONS
from retrograd.compat.fsdp2.versions import Version as Version
from retrograd.compat.fsdp2.versions import module as module
from retrograd.compat.fsdp2.versions import refuse as refuse
from retrograd.compat.fsdp2.versions import version as version
from retrograd.compat.fsdp2_state import leftovers as leftovers
