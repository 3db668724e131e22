"""Plans that are the same in all processes of a job: the first process of a mesh searches, the others get its plan."""

import json
from collections.abc import Callable
from dataclasses import replace

from diffshard.plans.file import from_json, to_json
from diffshard.processes import Processes, processes_of
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.request import PlanRequest

FindPlan = Callable[[PlanRequest], Plan]


def plan_of_first_process(find: FindPlan, request: PlanRequest, processes: Processes | None = None) -> Plan:
    """Returns the plan that the first process finds; in one process only, it just searches.

    Args:
      find: finds a plan.
      request: for the same function in all processes.
      processes: whose plan it is; None for those that own devices of the mesh.

    Raises:
      InfeasibleError: as `find`, in all processes; so is any other error of the search.
      ProcessesError: as `Processes.shared`.
    """
    options = request.options

    def pack(plan: Plan) -> bytes:
        return json.dumps({"plan": to_json(plan), "stored_in": plan.stored_in}).encode()

    def unpack(content: bytes) -> Plan:
        document = json.loads(content)
        mesh = options.candidate_with(document["plan"]["mesh_axes"]).mesh
        plan = from_json(document["plan"], "the plan of the first process", Plan, mesh)
        return replace(plan, stored_in=document["stored_in"])

    what = f"search a plan of {options.function_name}"
    processes = processes_of(options.mesh) if processes is None else processes
    plan = processes.shared(what, lambda: find(request), pack=pack, unpack=unpack)
    return request.complete(plan)
