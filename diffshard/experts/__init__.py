"""Plans that experts write by hand, for any function: data parallel, FSDP, Megatron and their mixtures.

`shardings.py` has the experts: each gives every argument a spec by a rule that its paper states. `base.py` says what
they know about an argument, which `arguments.py` reads off pytrees, and `tensor_parallel.py` which dimension of a
parameter Megatron splits. `plans.py` is `diffshard.expert_plans`, which completes their shardings to plans.
"""
