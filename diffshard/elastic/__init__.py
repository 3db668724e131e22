"""Training that goes on with the devices that there are, and devices that change by a schedule.

>>> with diffshard.resume("checkpoints", train_step, mesh, init_state, batch) as training:
...     state = training.restore()
>>> phases = [diffshard.elastic.Phase(mesh=m, num_steps=500) for m in (mesh, smaller_mesh)]
>>> plans = diffshard.elastic.budget(train_step, phases, state, batch)
>>> weights = diffshard.elastic.reshard(weights, shardings)

`diffshard.resume` is in `resume.py`, with checkpoints in `checkpoint_files.py` and the files beside it;
`search_while_training` in `searching_step.py`, which plan to run next in `replanning.py`, and what measured steps say
of the hardware's rates in `rates.py`.
"""

from typing import TYPE_CHECKING

from diffshard.public_names import lazy_names

if TYPE_CHECKING:
    from diffshard.budgets.base import Budget as Budget
    from diffshard.budgets.base import Phase as Phase
    from diffshard.budgets.budget import budget as budget
    from diffshard.budgets.logs import phases_of_log as phases_of_log
    from diffshard.elastic.checkpoint_files import CheckpointError as CheckpointError
    from diffshard.elastic.searching_step import SearchingStep as SearchingStep
    from diffshard.elastic.searching_step import search_while_training as search_while_training
    from diffshard.elastic.training import Training as Training
    from diffshard.resharding import Move as Move
    from diffshard.resharding import reshard as reshard
    from diffshard.resharding import reshard_price as reshard_price

__getattr__, __dir__, __all__ = lazy_names(__name__)
