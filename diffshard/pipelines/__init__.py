"""Training steps in micro-batches, the division of layers into stages, and layers on devices.

>>> step = diffshard.search(train_step, cluster, pipeline=diffshard.Pipeline())
>>> step = diffshard.pipelines.in_microbatches(train_step, 4)
>>> placement = diffshard.pipelines.place([3, 3, 3, 2, 4, 4], [[0, 2, 4], [2, 0, 3], [4, 3, 0]])
"""

from typing import TYPE_CHECKING

from diffshard.public_names import lazy_names

if TYPE_CHECKING:
    from diffshard.pipelines.delayed_gradients import DelayedArray as DelayedArray
    from diffshard.pipelines.delayed_gradients import current_version as current_version
    from diffshard.pipelines.delayed_gradients import delayed as delayed
    from diffshard.pipelines.execution import StageError as StageError
    from diffshard.pipelines.loss_limits import LossLimit as LossLimit
    from diffshard.pipelines.microbatches import in_microbatches as in_microbatches
    from diffshard.pipelines.pipelined_function import PipelinedFunction as PipelinedFunction
    from diffshard.placing import Placement as Placement
    from diffshard.placing import place as place
    from diffshard.staged_array import StagedArray as StagedArray

__getattr__, __dir__, __all__ = lazy_names(__name__)
