"""A plan as JSON: written, described by its schema, and read."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest

from preheat.core import Device, MachineUse
from preheat.core.plan import Alternative, Cost, LongestContext, Plan, Rejection, Searched, SpeedNow, Startup
from preheat.files import BadJson, build_schema, read_record, to_json
from preheat.planning.search.result import describe_shortfall, hint_fragmentation
from tests.unit.plans import plan_of, values_of

BUSY = MachineUse(1.0, own_cores=0.5, other_cores=1.5, cpus=2, threads=2)
FULL = replace(
    plan_of(values_of(12.0, 80.0)),
    now=SpeedNow(9.0, 0.5, BUSY),
    recipe={"name": "n", "techniques": {"lora": {"rank": 8}}},
    cost=Cost(2.5, 0.1, None),
    startup=Startup(("compile",), None),
    alternatives=(Alternative("w", {"lora": {}}, 9.0, 100.0, 1.0, 0.4, "slower", options=("--method", "lora")),),
    rejected=(Rejection("r", "why"),),
    searched=Searched(7, 2, confirmed=True),
    longest_context=LongestContext(0, None, "why"),
    settled={"compile.when": "never"},
)


@pytest.mark.parametrize("plan", [plan_of(values_of(81.0, 80.0)), FULL])
def test_a_plan_is_read_as_it_was_written_and_as_its_schema_says(plan: Plan) -> None:
    written = json.loads(to_json(plan))
    schema = build_schema(Plan)
    jsonschema.validate(written, schema)
    assert written.keys() == schema["properties"].keys()
    assert not [name for name, value in schema["properties"].items() if not value.get("description")]
    assert read_record(Plan, written) == plan


def test_what_follows_from_other_fields_is_computed_and_not_read() -> None:
    written = json.loads(to_json(FULL))
    assert (written["fits"], written["verdict"], written["now"]["machine"]["alone"]) == (True, "fits", False)
    read = read_record(Plan, {**written, "fits": False, "peak_gib": 79.9, "later": 1})
    assert (read.fits, read.verdict) == (True, "does not fit safely")


def test_a_refusal_names_the_limit_and_a_hint_the_allocator() -> None:
    small, gpu = {"kind": "cpu", "name": "a CPU", "memory": 1}, {"kind": "cuda", "name": "G", "memory": 1}
    assert describe_shortfall(plan_of(values_of(2.0, 0.5, device=small))) == "does not fit: needs 2.00 GiB, has 512 MiB"
    below = describe_shortfall(plan_of(values_of(0.1, 2**-30, device=small)))
    assert below == "does not fit: needs 102 MiB, and the process itself takes all that a CPU may use"
    cached = {"overhead": {"allocator": 5.0}, "device": gpu}
    fragmented = plan_of(values_of(82.0, 80.0, **cached))
    assert hint_fragmentation(fragmented).startswith("5.0 of it is fragmented free memory; expandable segments")
    retries = plan_of(values_of(79.0, 80.0, **cached, allocator_retries=True))
    assert hint_fragmentation(retries).startswith("the allocator must release cached memory in each step")
    for device in (small, {**gpu, "expandable": True}):
        assert hint_fragmentation(replace(fragmented, device=Device(**device))) == ""
    assert hint_fragmentation(plan_of(values_of(90.0, 80.0, **cached))) == "", "the tensors alone do not fit"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_gib": "1"}, r"peak_gib: '1': .*valid number"),
        ({"steps": 1.5}, r"steps: 1\.5: .*integer"),
        ({"parameters": {"total": 1, "active": 1}}, r"parameters\.trained: .*required"),
        ({"peak_gib_interval": [1.0]}, r"peak_gib_interval"),
        ({"device": {"kind": "tpu", "name": "x", "memory": 1}}, r"device\.kind: 'tpu': .*'cpu' or 'cuda'"),
        ({"peak_gib": None}, r"peak_gib: None: "),
        ({"peak_gib": 0.0}, r"the peak or its interval is empty"),
        ({"peak_gib_interval": [2.0, 2.0]}, r"the peak or its interval is empty"),
    ],
)
def test_a_damaged_plan_is_one_line_that_names_the_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadJson, match=message) as raised:
        plan_of({**values_of(1.0, 8.0), **changes})
    assert "\n" not in str(raised.value)
