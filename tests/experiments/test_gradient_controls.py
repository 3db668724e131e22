"""The controls of the gradient, on small problems."""

from experiments import gradient_controls
from tests.experiments.printed_tables import printed_rows


def test_no_control_finds_better_tables_and_pipelines_than_the_gradient(capsys):
    for kind in ("tables", "pipelines"):
        gradient_controls.main(["--only", kind, "--seeds", "1", "--most-problems", "16"])
        (row,) = printed_rows(capsys.readouterr().out)
        assert all(float(ratio) >= 0.99 for ratio in row[5:10])
        assert float(row[2].removesuffix("%")) < 20


def test_on_a_step_that_links_bound_the_gradient_of_a_mixture_decides():
    setting = next(gradient_controls.step_settings((4096,)))
    own = gradient_controls.with_gradient(setting, 8)
    one_hot = gradient_controls.with_weights_of(setting, gradient_controls.controls(0)["one-hot"][0], 8, 60.0)
    assert own.lower_bound <= own.price < 0.8 * one_hot.price
