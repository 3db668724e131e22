"""Plans of the bilevel search as versioned JSON, in the form that `diffshard.plans.documents` gives to all plans."""

from collections.abc import Mapping
from typing import Any

from diffshard.bilevel_search.plans.consistency import check_bilevel_plan
from diffshard.plans.documents import BILEVEL, RecordFile


def _of_newest_version(values: dict[str, Any], version: int) -> dict[str, Any]:
    if "proof" not in values:  # without it what was measured would pass for a prediction
        raise ValueError("it has no `proof`")
    if version == 1:
        values = _from_version_1(values)
    return _with_new_names(values, {"groups": "nodes"}) if version < 3 else values


def _from_version_1(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of version 1 under the names of version 2; damaged values stay and are refused later."""
    new_values = {_NEW_NAMES.get(name, name): value for name, value in values.items()}
    if isinstance(new_values.get("groups"), list):
        new_values["groups"] = [_group_from_version_1(group) for group in new_values["groups"]]
    if isinstance(proof := new_values["proof"], dict):  # the first files of version 1 repeat the first of the table
        table = [_with_new_names(candidate, {"row": "record"}) for candidate in proof.get("table", ())]
        new_values["proof"] = {**{k: v for k, v in proof.items() if k != "winner"}, "table": table}
    return new_values


_NEW_NAMES = {"lossless": "all_exact"}


def _group_from_version_1(group: Any) -> Any:
    if not isinstance(group, dict) or not isinstance(traffic := group.get("traffic"), dict):
        return group
    new_traffic = {name: value for name, value in traffic.items() if name != "exact_sent_bytes"}
    return {
        **group,
        "traffic": _with_new_names(new_traffic, {"times": "count"}),
        "exact_sent_bytes": traffic.get("exact_sent_bytes"),
    }


def _with_new_names(record: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(record, dict):
        return record
    return {names.get(name, name): value for name, value in record.items()}


_FILE = RecordFile(BILEVEL, 3, check_bilevel_plan, older=(1, 2), upgrade=_of_newest_version)
save, load, to_json, from_json = _FILE.save, _FILE.load, _FILE.to_json, _FILE.from_json
