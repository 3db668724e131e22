"""The table of searched GPTs, of one that is small enough for a test."""

from experiments.pipelines.searched_gpts import main
from tests.experiments.printed_tables import printed_rows


def test_a_small_gpt_is_searched_and_stands_beside_equal_stages(capsys):
    words = "--sizes 1.3B --layers 1 --devices-each 2 --batch 8 --microbatches 4 --schedules 1f1b --max-stages 2"
    main(words.split())
    (model, devices, _, equal_s, throughput, found_s, planned_s, bound_s, gap, _), plan = printed_rows(
        capsys.readouterr().out
    )
    assert (model, devices, plan[0], plan[1]) == ("1.3B", "2", "1.3B", "4")
    assert float(throughput) >= 0.99  # rounding of what is printed apart, no slower than equal stages
    assert abs(float(equal_s) / float(found_s) / float(throughput) - 1) < 0.1
    assert float(bound_s) <= float(planned_s)
    assert float(gap.rstrip("%")) < 100
