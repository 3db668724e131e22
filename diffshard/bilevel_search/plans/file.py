"""Plans of the bilevel search as versioned JSON, in the form that `diffshard.plans.documents` gives to all plans."""

from diffshard.bilevel_search.plans.consistency import check_bilevel_plan
from diffshard.plans.documents import BILEVEL, RecordFile

# Without its proof, what was measured would pass for a prediction.
_FILE = RecordFile(BILEVEL, 3, check_bilevel_plan, needed=("proof",))
save, load, to_json, from_json = _FILE.save, _FILE.load, _FILE.to_json, _FILE.from_json
