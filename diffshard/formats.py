"""What changes numbers, for less time: products in fewer bits, lossy collectives, and what `bilevel` chooses from.

>>> step = diffshard.search(train_step, mesh, formats=diffshard.formats.Formats(max_loss_increase=0.01))
>>> plan = diffshard.bilevel(device_loss, mesh, params, batch, max_loss_increase=0.01)

`Formats` asks `search` for products in fewer bits; `Carried` is a state with what error feedback adds to it. `bilevel`
chooses for each collective a strategy (`Exact`, `Encode` in a precision such as `INT8`, `EveryK`, `ErrorFeedback`,
`Schedule`, `LastGradient`), by an estimate of what it does to the loss. `alternatives` declares approximations of your
own; `expert_layer` and `windowed_attention` are layers that have some.
"""

from typing import TYPE_CHECKING

from diffshard.public_names import lazy_names

if TYPE_CHECKING:
    from diffshard.bilevel_search.plans.plan import Pareto as Pareto
    from diffshard.bilevel_search.plans.plan import pareto as pareto
    from diffshard.bilevel_search.search import BilevelSearch as BilevelSearch
    from diffshard.bilevel_search.validation_runs import CandidatesData as CandidatesData
    from diffshard.sharding_search.carried import Carried as Carried
    from diffshard.sharding_search.number_formats import Formats as Formats
    from search_spaces.communication.base import BFLOAT16 as BFLOAT16
    from search_spaces.communication.base import FLOAT8 as FLOAT8
    from search_spaces.communication.base import INT4 as INT4
    from search_spaces.communication.base import INT8 as INT8
    from search_spaces.communication.call_sites import alternatives as alternatives
    from search_spaces.communication.space import CommunicationSpace as CommunicationSpace
    from search_spaces.communication.strategies import Encode as Encode
    from search_spaces.communication.strategies import ErrorFeedback as ErrorFeedback
    from search_spaces.communication.strategies import EveryK as EveryK
    from search_spaces.communication.strategies import Exact as Exact
    from search_spaces.communication.strategies import LastGradient as LastGradient
    from search_spaces.communication.strategies import Schedule as Schedule
    from search_spaces.communication.two_layers import expert_layer as expert_layer
    from search_spaces.communication.two_layers import windowed_attention as windowed_attention

__getattr__, __dir__, __all__ = lazy_names(__name__)
