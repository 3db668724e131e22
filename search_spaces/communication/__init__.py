"""The space of communication strategies: how precisely and how often the devices of a mesh send their numbers.

A lossy strategy saves time and changes the loss; the space says how much of each. Here is all of it on one `psum`.
Devices along "model" each hold a part of the rows of `w`, devices along "data" a part of the rows of `x`.

>>> import jax, jax.numpy as jnp
>>> from jax.sharding import PartitionSpec as P
>>> from cost.base import Hardware, Link
>>> from search_spaces.communication.base import INT8
>>> from search_spaces.communication.space import CommunicationSpace
>>> from search_spaces.communication.strategies import Encode, Exact
>>> def loss_fn(params, x):  # as each device computes it
...     with jax.named_scope("mlp"):
...         y = jax.lax.psum(x @ params["w"], "model")
...     return jnp.square(y - 1).mean()
>>> key_w, key_x, key = jax.random.split(jax.random.key(0), 3)
>>> params, x = {"w": jax.random.normal(key_w, (64, 128)) / 8}, jax.random.normal(key_x, (256, 64))
>>> link = Link(latency_s=1e-6, s_per_byte=1e-9)
>>> space = CommunicationSpace(
...     loss_fn, {"data": 2, "model": 2}, params, x, {"w": P("model")}, P("data", "model"),
...     strategies=dict.fromkeys(("forward", "backward", "gradient"), (Exact(), Encode(INT8))),
...     hardware=Hardware("example", 1e12, 1e11, 1e10, {"data": link, "model": link}))

The `psum` is the only *call site* of the loss. It has two *operations*, because its result goes forward and its
cotangent backward. The third operation is the sum of the gradient of `w` over "data", which every training step needs.

>>> for operation in space.operations:
...     print(operation.name, operation.axes, operation.shape)
mlp/all_reduce forward ('model',) (128, 128)
mlp/all_reduce backward ('model',) (128, 128)
w gradient ('data',) (32, 128)

Operations of one type form a *group*, and each group is a *node* of the problem with its strategies.

>>> [(name, space.strategy_names(v)) for v, name in enumerate(space.node_names)][2]
('matrices over data gradient', ('exact', 'int8'))

*What it costs.* The exact all-reduce of 64 KiB between two devices sends 65,536 bytes, in 1 + 65.5 µs. Codes of int8
are a fourth of that, and each block of 128 has a scale of 4 bytes; encoding them takes 2.9 µs, two messages 2 µs.

>>> for part in space.explain([0, 1, 1])[:2]:
...     print(part.name, part.traffic.sent_bytes, f"{1e6 * part.seconds:.1f} µs")
mlp/all_reduce forward 65536.0 66.5 µs
mlp/all_reduce backward 16896.0 21.8 µs

*What runs* is the loss with the chosen strategies instead of its collectives. One device simulates the mesh, until
`space.on_mesh(mesh)` moves the space onto real devices.

>>> step = jax.jit(space.decode([1, 0, 0]))
>>> loss, gradients, residuals = step(params, x, space.init_residuals(params), key, 0)

*What its error does.* For each node the space predicts how much each strategy increases the loss; 0 where it is exact.

>>> increases = jax.jit(space.loss_increases)(params, x, key)
>>> for name, row in zip(space.node_names, increases, strict=True):
...     print(name, [f"{float(increase):.0e}" for increase in row])
mlp/all_reduce forward ['0e+00', '3e-06']
mlp/all_reduce backward ['0e+00', '1e-07']
matrices over data gradient ['0e+00', '8e-07']

The vocabulary is in `base.py`. `call_sites.py` finds the call sites of a loss and `operations.py` its operations and
groups; `strategies.py` lists what can run there; collectives and codes are in `collectives.py`. `device_step.py` runs a
selection on each device and `simulated_spmd.py` all devices on one. `costs.py` prices a choice, `loss_increases.py`
predicts what errors do to the loss, and `space.py` puts all together. The folder `two_layers` has an expert layer and
attention over a split sequence. They use `call_sites.alternatives`, a choice between functions.
"""
