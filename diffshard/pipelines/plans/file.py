"""Plans of pipelines as versioned JSON, in the form that `diffshard.plans.documents` gives to all plans."""

from diffshard.pipelines.plans.consistency import check_pipeline_plan
from diffshard.plans.documents import PIPELINE, RecordFile

_FILE = RecordFile(PIPELINE, 2, check_pipeline_plan, without=("stored_in",))
save, load, to_json, from_json = _FILE.save, _FILE.load, _FILE.to_json, _FILE.from_json
