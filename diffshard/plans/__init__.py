"""Plans of shardings as data, and how they are shown and saved.

>>> plan.certificate.gap  # how much less the best possible plan can take at most
>>> warnings.simplefilter("ignore", diffshard.plans.WholeWorkWarning)

`base.py` has the records of a plan. `text.py` is what `print(plan)` shows and `page.py` the HTML page; both take their
facts from `summary.py`, which shows arguments and operations that are alike only once. The page also shows the plan by
`layers.py`: which layer runs when, and what is sent between layers; and its memory by `memory.py`. Small sections, such
as advice, are in `sections.py`. `file.py` saves and loads plans as JSON. `comparison.py` has plans beside the programs
that XLA makes of them, and `timeline.py` what these do when.

All kinds of plans share `plan_record.py`, which says how good a plan is known to be, and has the protocol of those that
are one record, `documents.py` for their files and folders of them, `printing.py` for quantities, tables and names that
repeat, `page_elements.py` for the parts, drawings and style of a page.
"""

from typing import TYPE_CHECKING

from diffshard.public_names import lazy_names

if TYPE_CHECKING:
    from diffshard.plans.comparison import Comparison as Comparison
    from diffshard.plans.plan_record import Certificate as Certificate
    from diffshard.plans.sections import WholeWorkWarning as WholeWorkWarning
    from diffshard.sharding_search.planned_function import PlannedFunction as PlannedFunction

__getattr__, __dir__, __all__ = lazy_names(__name__)
