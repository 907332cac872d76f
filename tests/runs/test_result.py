"""The figures of a run: the reports of several processes of one worker become one."""

import pytest

import shoal
from shoal.runs.result import joined

REPORT = {
    **{"role": "worker", "rank": 0, "samples": 8, "seconds": 2.0, "wait_seconds": 0.5},
    **{"parameters": 6, "dense_bytes": 1, "coded_bytes": 2, "bytes_sent": 3, "bytes_received": 4},
    "messages_sent": 5,
}


def test_traffic_of_a_group_is_that_of_all_its_processes_and_samples_are_counted_once():
    other = {**REPORT, "parameters": 4, "bytes_sent": 30, "wait_seconds": 0.9}
    (one,) = joined([{**REPORT}, other])
    assert (one["parameters"], one["bytes_sent"], one["messages_sent"]) == (10, 33, 10)
    assert (one["samples"], one["seconds"], one["wait_seconds"]) == (8, 2.0, 0.5)


def test_reports_of_different_nodes_stay_as_they_are():
    reports = [{**REPORT}, {**REPORT, "rank": 1}, {**REPORT, "role": "server"}]
    assert joined(reports) == [{**REPORT}, {**REPORT, "rank": 1}, {**REPORT, "role": "server"}]


@pytest.mark.parametrize(("strategy", "servers"), [("asgd", 2), ("hierarchical", 1), ("halos", 1)])
def test_the_samples_of_a_run_in_which_a_worker_died_are_those_in_the_model(strategy, servers):
    faults = shoal.Faults(noticed_after=0.01).crash(rank=3, step=5)
    result = shoal.run(
        "digits", strategy, workers=4, servers=servers, epochs=1, transport="sim", faults=faults
    )
    assert result.samples == 1437
