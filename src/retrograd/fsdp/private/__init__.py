"""Every private name of PyTorch that buckets rest on, in one place, and a test that they still mean what they meant.

FSDP2 offers no public hook between "the gradients of a group are ready" and "reduce them": a custom reduce-scatter is
called too late, what follows it divides, casts and hands out. So one global name of
`torch.distributed.fsdp._fully_shard._fsdp_param_group` is replaced: `foreach_reduce`, which copies gradients in,
reduces, casts and hands out, for any list of parameters. Calls for models without buckets pass through.

Read in 2.11.0, 2.12.1, 2.13.0 and 2.15.0; what differs between them stands in `VERSIONS`.
"""

from __future__ import annotations

from retrograd.fsdp.private.calls import Call as Call
from retrograd.fsdp.private.calls import arguments_of as arguments_of
from retrograd.fsdp.private.calls import device_handle as device_handle
from retrograd.fsdp.private.calls import give_back as give_back
from retrograd.fsdp.private.calls import reduce_as_given as reduce_as_given
from retrograd.fsdp.private.calls import take_over as take_over
from retrograd.fsdp.private.calls import wire_dtype as wire_dtype
from retrograd.fsdp.private.calls import with_comm as with_comm
from retrograd.fsdp.private.groups import begun as begun
from retrograd.fsdp.private.groups import buffers_in_flight as buffers_in_flight
from retrograd.fsdp.private.groups import compiled_autograd as compiled_autograd
from retrograd.fsdp.private.groups import custom_comms as custom_comms
from retrograd.fsdp.private.groups import drop_gradients as drop_gradients
from retrograd.fsdp.private.groups import failed as failed
from retrograd.fsdp.private.groups import forget as forget
from retrograd.fsdp.private.groups import forward_order as forward_order
from retrograd.fsdp.private.groups import grad_dtype as grad_dtype
from retrograd.fsdp.private.groups import groups_of as groups_of
from retrograd.fsdp.private.groups import in_backward as in_backward
from retrograd.fsdp.private.groups import inputs_kept as inputs_kept
from retrograd.fsdp.private.groups import look_again as look_again
from retrograd.fsdp.private.groups import manual as manual
from retrograd.fsdp.private.groups import modules_of as modules_of
from retrograd.fsdp.private.groups import names_of as names_of
from retrograd.fsdp.private.groups import no_gradient as no_gradient
from retrograd.fsdp.private.groups import parameter_names as parameter_names
from retrograd.fsdp.private.groups import ranks_of as ranks_of
from retrograd.fsdp.private.groups import shadow as shadow
from retrograd.fsdp.private.groups import shape_of_mesh as shape_of_mesh
from retrograd.fsdp.private.groups import states_of as states_of
from retrograd.fsdp.private.groups import trainable as trainable
from retrograd.fsdp.private.groups import uncompiled as uncompiled
from retrograd.fsdp.private.groups import unshadow as unshadow
from retrograd.fsdp.private.groups import wait_for_offload as wait_for_offload
from retrograd.fsdp.private.groups import wire_numel as wire_numel
from retrograd.fsdp.private.versions import BACKWARD_BEGINS as BACKWARD_BEGINS
from retrograd.fsdp.private.versions import BACKWARD_ENDS as BACKWARD_ENDS
from retrograd.fsdp.private.versions import FORWARD_BEGINS as FORWARD_BEGINS
from retrograd.fsdp.private.versions import INPUTS_WATCHED as INPUTS_WATCHED
from retrograd.fsdp.private.versions import RESET as RESET
from retrograd.fsdp.private.versions import VERSIONS as VERSIONS
from retrograd.fsdp.private.versions import Version as Version
from retrograd.fsdp.private.versions import module as module
from retrograd.fsdp.private.versions import original as original
from retrograd.fsdp.private.versions import refuse as refuse
from retrograd.fsdp.private.versions import self_test as self_test
from retrograd.fsdp.private.versions import version as version
from retrograd.sharded import leftovers as leftovers
